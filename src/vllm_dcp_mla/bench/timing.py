"""How long work takes: medians of many passes, two rounds of everything, one after the other.

A pass goes over several input sets, which together are larger than the L2, so that a launch finds
its inputs where an engine's would be: in memory. Two rounds of the same work bound the noise.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

_LEAST_PASSES = 3
_MOST_PASSES = 50
_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Timing:
    """What was measured of one version.

    Attributes:
        us: microseconds, the mean of the rounds' medians.
        spread: how far apart the rounds' medians are, as a fraction of the smaller.
    """

    us: float
    spread: float


class Stopwatch(Protocol):
    """Times passes."""

    def prepare(self, work: Callable[[], object]) -> Callable[[], float]:
        """Warms ``work`` up; returns what runs it once and says the microseconds."""
        ...


class HostStopwatch:
    """The host's clock, around work that the GPU has finished before and after."""

    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        self._wait = wait

    def prepare(self, work: Callable[[], object]) -> Callable[[], float]:
        """See :class:`Stopwatch`; how long the host is busy with ``work``."""
        work()

        def once() -> float:
            self._wait()
            started = time.perf_counter_ns()
            work()
            return (time.perf_counter_ns() - started) / 1e3

        return once


class GraphStopwatch:
    """Replays of a CUDA graph between two events: no launch waits for the host."""

    def prepare(self, work: Callable[[], object]) -> Callable[[], float]:
        """See :class:`Stopwatch`; ``work`` must be fit for capture."""
        import torch

        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return _between_events(graph.replay)


class QueuedStopwatch:
    """Events around work that the host enqueues while the GPU is busy with something else.

    Work that never waits for the GPU is enqueued before the GPU reaches it, and takes as long as
    its kernels. Work that waits lets the GPU run dry meanwhile, which counts.
    """

    def __init__(self, busy_cycles: int) -> None:
        self._busy_cycles = busy_cycles

    def prepare(self, work: Callable[[], object]) -> Callable[[], float]:
        """See :class:`Stopwatch`."""
        import torch

        cuda: Any = torch.cuda
        work()
        return _between_events(work, lambda: cuda._sleep(self._busy_cycles))


def _between_events(
    work: Callable[[], object], before: Callable[[], object] = lambda: None
) -> Callable[[], float]:
    import torch

    cuda: Any = torch.cuda
    start, stop = (cuda.Event(enable_timing=True) for _ in range(2))

    def once() -> float:
        torch.cuda.synchronize()
        before()
        start.record()
        work()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e3

    once()
    return once


def compare(
    works: Mapping[Any, Callable[[], object]],
    stopwatch: Stopwatch,
    *,
    launches: int = 1,
    budget_us: float = 200_000.0,
    refusals: tuple[type[Exception], ...] = (),
    refused: Callable[[Any, Exception], object] = lambda name, error: None,
) -> dict[Any, Timing]:
    """Times versions of the same work side by side.

    Args:
        works: what to run for each version.
        stopwatch: times a pass.
        launches: how many launches a pass of any version stands for.
        budget_us: how long to repeat a version, all rounds together.
        refusals: errors with which a version may refuse to be timed; the others are.
        refused: told of them.
    """
    passes = {}
    for name, work in works.items():
        try:
            passes[name] = stopwatch.prepare(work)
        except refusals as error:
            refused(name, error)
    repeats = {name: number_of_passes(once(), budget_us / _ROUNDS) for name, once in passes.items()}
    rounds: dict[Any, list[float]] = {name: [] for name in passes}
    for _ in range(_ROUNDS):
        for name, once in passes.items():
            rounds[name].append(statistics.median(once() for _ in range(repeats[name])))
    return {name: summarise(medians, launches) for name, medians in rounds.items()}


def number_of_passes(pass_us: float, budget_us: float) -> int:
    """Passes of a round that the budget allows, within bounds."""
    return int(min(max(budget_us / max(pass_us, 1e-3), _LEAST_PASSES), _MOST_PASSES))


def summarise(medians: list[float], launches: int) -> Timing:
    """The timing that follows from the medians of all rounds, in microseconds a pass."""
    lowest = min(medians)
    spread = (max(medians) - lowest) / lowest if lowest > 0 else 0.0
    return Timing(statistics.fmean(medians) / launches, spread)


def number_of_sets(set_bytes: int, l2_bytes: int) -> int:
    """Input sets of a pass: four times the L2 together, between 2 and 256 of them."""
    return min(max(-(-4 * l2_bytes // max(set_bytes, 1)), 2), 256)
