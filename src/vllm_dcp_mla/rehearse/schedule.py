"""Runs engines, several at a time where they share GPUs and there is room."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import mps
from .engine import EngineSpec
from .faults import Fault
from .launch import Engine, EngineError
from .machine import Machine, MachineError
from .placement import Placement
from .requests import Requests

#: Device memory of a rank of the small model: CUDA's context, weights, workspace, KV cache, NCCL's
#: buffers and what a step needs beside them.
RANK_BYTES = 12 << 30
#: A rank compiles on two cores while it starts.
_CORES_PER_RANK = 2
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class EngineResult:
    """What an engine answered, rank by rank, or why it did not."""

    spec: EngineSpec
    seconds: float
    ranks: list[dict[str, Any]] = field(default_factory=list)
    failure: str | None = None


def place(
    machine: Machine, largest: int, ranks_per_gpu: int, *, packed: bool, quiet: bool
) -> Placement:
    """Room for engines of up to ``largest`` ranks, several at a time where ranks share GPUs.

    Args:
        machine: this machine.
        largest: ranks of the largest engine.
        ranks_per_gpu: of the largest engine.
        packed: all engines have so many, even where their ranks could have a GPU each.
        quiet: nothing runs beside an engine, which watches its GPUs' memory.

    Raises:
        MachineError: the largest engine does not fit the free memory.
    """
    if ranks_per_gpu == 1:
        return Placement(len(machine.gpus), 1, 1)
    free = min(gpu.free_bytes for gpu in machine.gpus)
    fits = free // RANK_BYTES
    share = min(ranks_per_gpu, largest)
    if fits < share:
        raise MachineError(
            f"a GPU has {free / 2**30:.1f} GiB free, and {share} ranks on it need "
            f"{share * RANK_BYTES / 2**30:.0f}; end what else uses it, or rehearse fewer ranks."
        )
    room = share
    if (
        mps.available() and not quiet
    ):  # else every further process makes all others wait for their turn
        cores = (os.cpu_count() or 1) // _CORES_PER_RANK // len(machine.gpus)
        room = max(share, min(fits, cores))
    return Placement(len(machine.gpus), ranks_per_gpu if packed else None, room, quiet)


def run(
    specs: Sequence[tuple[EngineSpec, Requests]],
    folder: Path,
    *,
    placement: Placement,
    engine_seconds: float,
    fault: Fault | None,
    progress: Callable[[str], None],
) -> dict[str, EngineResult]:
    """Runs every engine; its result by name. All processes have ended when this returns or raises.

    Args:
        specs: engines and what they serve.
        folder: private; gets a folder for each engine.
        placement: the GPUs.
        engine_seconds: after which an engine is given up.
        fault: planted into engines under DCP, or None.
        progress: told what is going on, often.
    """
    waiting = list(specs)
    running: dict[str, tuple[Engine, tuple[int, ...]]] = {}
    results: dict[str, EngineResult] = {}
    warm = False
    try:
        while waiting or running:
            # The first engine compiles what all need: it starts alone, the others find it done.
            warm = warm or any(engine.is_ready() for engine, _ in running.values())
            while (
                waiting
                and (warm or not running)
                and (gpus := placement.take(waiting[0][0].world)) is not None
            ):
                spec, requests = waiting.pop(0)
                engine = Engine(
                    spec,
                    folder / spec.name,
                    time.monotonic() + engine_seconds,
                    fault if spec.dcp > 1 else None,
                )
                running[spec.name] = engine, gpus
                engine.start(requests, gpus, placement.share(spec.world))
            for name, (engine, gpus) in list(running.items()):
                if (result := _poll(engine)) is not None:
                    warm = True
                    results[name] = result
                    placement.give_back(gpus, engine.spec.world)
                    del running[name]
            progress("; ".join(engine.progress() for engine, _ in running.values()))
            time.sleep(_POLL_SECONDS)
    finally:
        for engine, _ in running.values():
            engine.end()
    return results


def _poll(engine: Engine) -> EngineResult | None:
    try:
        ranks = engine.poll()
    except EngineError as failure:
        return EngineResult(engine.spec, time.monotonic() - engine.started, failure=str(failure))
    if ranks is None:
        return None
    return EngineResult(engine.spec, time.monotonic() - engine.started, ranks)
