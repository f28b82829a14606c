"""Runs engines, several at a time where they share GPUs and there is room."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .engine import EngineSpec
from .faults import Fault
from .launch import Engine, EngineError
from .machine import Machine, MachineError
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


def ranks_at_once(machine: Machine, largest: int, ranks_per_gpu: int) -> int:
    """Ranks that may run at a time, at least those of the largest engine.

    Raises:
        MachineError: the largest engine does not fit the free memory.
    """
    if ranks_per_gpu == 1 and largest > 1:
        return largest
    free = min(gpu.free_bytes for gpu in machine.gpus)
    fits = free // RANK_BYTES
    if fits < min(ranks_per_gpu, largest):
        raise MachineError(
            f"a GPU has {free / 2**30:.1f} GiB free, and {min(ranks_per_gpu, largest)} ranks on it "
            f"need {min(ranks_per_gpu, largest) * RANK_BYTES / 2**30:.0f}; end what else uses it, "
            "or rehearse with fewer ranks."
        )
    return max(largest, min(fits, (os.cpu_count() or 1) // _CORES_PER_RANK))


def run(
    specs: Sequence[tuple[EngineSpec, Requests]],
    folder: Path,
    *,
    ranks_per_gpu: int,
    at_once: int,
    engine_seconds: float,
    fault: Fault | None,
    progress: Callable[[str], None],
) -> dict[str, EngineResult]:
    """Runs every engine; its result by name. All processes have ended when this returns or raises.

    Args:
        specs: engines and what they serve.
        folder: private; gets a folder for each engine.
        ranks_per_gpu: that share a GPU.
        at_once: ranks that may run at a time.
        engine_seconds: after which an engine is given up.
        fault: planted into engines under DCP, or None.
        progress: told what is going on, often.
    """
    waiting = list(specs)
    running: list[Engine] = []
    results: dict[str, EngineResult] = {}
    try:
        while waiting or running:
            used = sum(engine.spec.world for engine in running)
            while waiting and used + waiting[0][0].world <= at_once:
                spec, requests = waiting.pop(0)
                engine = Engine(
                    spec,
                    folder / spec.name,
                    time.monotonic() + engine_seconds,
                    fault if spec.dcp > 1 else None,
                )
                running.append(engine)
                engine.start(requests, ranks_per_gpu)
                used += spec.world
            for engine in list(running):
                result = _poll(engine)
                if result is not None:
                    results[engine.spec.name] = result
                    running.remove(engine)
            progress("; ".join(engine.progress() for engine in running))
            time.sleep(_POLL_SECONDS)
    finally:
        for engine in running:
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
