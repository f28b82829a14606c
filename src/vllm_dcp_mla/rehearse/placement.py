"""Which GPUs an engine's ranks get: pure bookkeeping."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(slots=True)
class Placement:
    """Ranks on each GPU.

    Attributes:
        gpus: how many there are.
        ranks_per_gpu: of one engine; None for as few as its ranks need.
        capacity: ranks that a GPU takes at a time, of all engines.
        quiet: a GPU takes ranks of one engine at a time.
    """

    gpus: int
    ranks_per_gpu: int | None
    capacity: int
    quiet: bool = False
    _load: dict[int, int] = field(default_factory=dict)

    def share(self, ranks: int) -> int:
        """Ranks of an engine of so many that run on each of its GPUs."""
        return self.ranks_per_gpu or -(-ranks // self.gpus)

    def take(self, ranks: int) -> tuple[int, ...] | None:
        """GPUs for an engine, the least loaded ones; None while there is no room.

        Rank r runs on entry ``r // share(ranks)``.
        """
        parts = self._parts(ranks)
        order = sorted(range(self.gpus), key=lambda gpu: self._load.get(gpu, 0))
        chosen = tuple(sorted(order[: len(parts)]))
        if len(chosen) < len(parts) or (self.quiet and any(map(self._load.get, chosen))):
            return None
        after = {g: self._load.get(g, 0) + n for g, n in zip(chosen, parts, strict=True)}
        if max(after.values()) > self.capacity:
            return None
        self._load |= after
        return chosen

    def give_back(self, chosen: tuple[int, ...], ranks: int) -> None:
        """Takes an engine's ranks off its GPUs."""
        for gpu, part in zip(chosen, self._parts(ranks), strict=True):
            self._load[gpu] -= part

    def _parts(self, ranks: int) -> list[int]:
        share = self.share(ranks)
        return [min(share, ranks - first) for first in range(0, ranks, share)]


def visible(chosen: tuple[int, ...], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variable that shows an engine its GPUs alone, in the terms of the caller's own."""
    text = (os.environ if environ is None else environ).get(_VISIBLE)
    # An empty text hides every GPU, where none at all shows them all.
    names = None if text is None else [name.strip() for name in text.split(",")]
    return {_VISIBLE: ",".join(str(gpu) if names is None else names[gpu] for gpu in chosen)}
