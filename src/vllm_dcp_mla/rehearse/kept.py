"""What the ranks of an engine kept of their indexers, put together; written by :mod:`.record`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open

from .recall import Query


@dataclass(frozen=True, slots=True)
class Kept:
    """An engine's tensors.

    Attributes:
        ranks: for each rank what: query: tensor.
    """

    ranks: Sequence[dict[str, dict[Query, torch.Tensor]]]

    @classmethod
    def read(cls, ranks: Sequence[dict[str, Any]]) -> Kept | None:
        """Of an engine's results; None where nothing was kept."""
        if not ranks or any("record" not in rank for rank in ranks):
            return None
        named = []
        for rank in ranks:
            with safe_open(rank["record"], "pt") as file:
                named.append({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        return cls.of(named)

    @classmethod
    def of(cls, ranks: Sequence[dict[str, torch.Tensor]]) -> Kept:
        """Of each rank's tensors by name, ``prompt/layer/what/position``."""
        found: list[dict[str, dict[Query, torch.Tensor]]] = []
        for named in ranks:
            found.append({})
            for name, tensor in named.items():
                prompt, layer, what, position = name.split("/")
                found[-1].setdefault(what, {})[int(prompt), int(layer), int(position)] = tensor
        return cls(found)

    def queries(self) -> dict[Query, torch.Tensor]:
        """Positions that each kept query selected, ``[index_topk]`` int32 with -1 for none.

        Of several ranks that computed a query the first one's.
        """
        found: dict[Query, torch.Tensor] = {}
        for rank in self.ranks:
            for query, tensor in rank.get("selected", {}).items():
                found.setdefault(query, tensor)
        return found

    def hidden(self, prompt: int, layer: int, length: int) -> torch.Tensor | None:
        """``[length, hidden]`` of a layer's input; None where a part was not kept."""
        rows: torch.Tensor | None = None
        seen = torch.zeros(length, dtype=torch.bool)
        for rank in self.ranks:
            for (owner, at, position), tensor in rank.get("hidden", {}).items():
                if (owner, at) == (prompt, layer):
                    if rows is None:
                        rows = tensor.new_empty(length, tensor.shape[1])
                    rows[position : position + len(tensor)] = tensor
                    seen[position : position + len(tensor)] = True
        return rows if seen.all() else None
