"""What the ranks of an engine kept of their indexers, put together; written by :mod:`.record`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open

from .engine import EngineSpec
from .recall import Query

_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Kept:
    """An engine's tensors.

    Attributes:
        spec: the engine.
        ranks: for each rank what: query: tensor.
    """

    spec: EngineSpec
    ranks: Sequence[dict[str, dict[Query, torch.Tensor]]]

    @classmethod
    def read(cls, spec: EngineSpec, ranks: Sequence[dict[str, Any]]) -> Kept | None:
        """Of an engine's results; None where nothing was kept."""
        if not ranks or any("record" not in rank for rank in ranks):
            return None
        named = []
        for rank in ranks:
            with safe_open(rank["record"], "pt") as file:
                named.append({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        return cls.of(spec, named)

    @classmethod
    def of(cls, spec: EngineSpec, ranks: Sequence[dict[str, torch.Tensor]]) -> Kept:
        """Of each rank's tensors by name, ``prompt/layer/what/position``."""
        found: list[dict[str, dict[Query, torch.Tensor]]] = []
        for named in ranks:
            found.append({})
            for name, tensor in named.items():
                prompt, layer, what, position = name.split("/")
                found[-1].setdefault(what, {})[int(prompt), int(layer), int(position)] = tensor
        return cls(spec, found)

    def queries(self) -> dict[Query, torch.Tensor]:
        """Positions that each kept query selected, ``[index_topk]`` int32 with -1 for none.

        Ranks that computed the same query have the same answer, or :meth:`disagreements` names it.
        """
        found: dict[Query, torch.Tensor] = {}
        for rank in self.ranks:
            for query, tensor in rank.get("selected", {}).items():
                found.setdefault(query, tensor)
        return found

    def disagreements(self) -> list[Query]:
        """Queries for which two ranks selected different keys."""
        first, found = self.queries(), set()
        for rank in self.ranks:
            for query, tensor in rank.get("selected", {}).items():
                if not torch.equal(tensor.sort().values, first[query].sort().values):
                    found.add(query)
        return sorted(found)

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

    def one(self, what: str, query: Query) -> torch.Tensor | None:
        """A tensor that every rank that computed a query has alike."""
        return next((rank[what][query] for rank in self.ranks if query in rank.get(what, {})), None)

    def output(self, query: Query) -> torch.Tensor | None:
        """Attention's output of all heads, ``[heads * v_head_dim]``."""
        for first in range(0, len(self.ranks), self.spec.tp):
            ranks = self.ranks[first : first + self.spec.tp]
            parts = [rank.get("output", {}).get(query) for rank in ranks]
            if all(part is not None for part in parts):
                return torch.cat(parts)  # type: ignore[arg-type]
        return None

    def index_keys(self, prompt: int, layer: int, length: int, dim: int) -> torch.Tensor | None:
        """Cached index keys with their scales multiplied in, ``[length, dim]`` float32.

        The cache's blocks hold the fp8 keys of all their tokens, then a float32 scale for each.
        Under DCP, position p is on rank ``p % dcp``, which keeps it at ``p // dcp``.
        """
        shards = []
        for part in range(self.spec.dcp):
            blocks = self._of_shard(part).get("index_k", {}).get((prompt, layer, length - 1))
            if blocks is None:
                return None
            size = blocks.shape[1] // (dim + _SCALE_BYTES)
            keys = blocks[:, : size * dim].reshape(-1, dim).view(torch.float8_e4m3fn).float()
            scales = blocks[:, size * dim :].reshape(-1, _SCALE_BYTES).contiguous()
            shards.append(keys * scales.view(torch.float32))
        return torch.stack(shards, 1).flatten(0, 1)[:length]

    def _of_shard(self, part: int) -> dict[str, dict[Query, torch.Tensor]]:
        """The first rank with a part of the cache: ``dcp`` is 1, all ranks, or those of PCP."""
        along_pcp = self.spec.pcp > 1 and self.spec.dcp == self.spec.pcp
        return self.ranks[part * self.spec.tp if along_pcp else part]
