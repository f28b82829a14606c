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
        ranks_per_gpu: of one engine; 1 gives each rank a GPU for itself.
        capacity: ranks that a GPU takes at a time, of all engines.
    """

    gpus: int
    ranks_per_gpu: int
    capacity: int
    _load: dict[int, int] = field(default_factory=dict)

    def take(self, ranks: int) -> tuple[int, ...] | None:
        """GPUs for an engine, the least loaded ones; None while there is no room.

        Rank r runs on entry ``r // ranks_per_gpu``.
        """
        parts = [
            min(self.ranks_per_gpu, ranks - first) for first in range(0, ranks, self.ranks_per_gpu)
        ]
        order = sorted(range(self.gpus), key=lambda gpu: self._load.get(gpu, 0))
        chosen = tuple(sorted(order[: len(parts)]))
        if len(chosen) < len(parts):
            return None
        after = {g: self._load.get(g, 0) + n for g, n in zip(chosen, parts, strict=True)}
        if max(after.values()) > self.capacity:
            return None
        self._load |= after
        return chosen

    def give_back(self, chosen: tuple[int, ...], ranks: int) -> None:
        """Takes an engine's ranks off its GPUs."""
        for index, gpu in enumerate(chosen):
            self._load[gpu] -= min(self.ranks_per_gpu, ranks - index * self.ranks_per_gpu)


def visible(chosen: tuple[int, ...], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variable that shows an engine its GPUs alone, in the terms of the caller's own."""
    text = (os.environ if environ is None else environ).get(_VISIBLE)
    # An empty text hides every GPU, where none at all shows them all.
    names = None if text is None else [name.strip() for name in text.split(",")]
    return {_VISIBLE: ",".join(str(gpu) if names is None else names[gpu] for gpu in chosen)}
