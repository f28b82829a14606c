"""From what the engines answered to cases: right or wrong, with the figure that decided."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .configuration import Configuration
from .drift import DRIFT_LIMIT, Drift, compare, distance
from .observe import OURS
from .recall import Recall
from .schedule import EngineResult
from .workload import Prompt

if TYPE_CHECKING:
    from .against_plan import MemoryLine

#: Log-probabilities ``[positions][scored tokens]`` of a prompt.
Scores = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the outcome.

    Attributes:
        name: configuration and what was looked at.
        ok: whether it is as promised.
        error: the figure that decided: a drift ratio, a relative difference, a count.
        limit: the largest accepted one.
        problems: one sentence each.
        collectives: calls of each rank.
        syncs: waits for the GPU inside code of this package, of the worst rank.
        late_compiles: kernels of this package compiled while serving, of the worst rank.
        seconds: of the engine, start included.
        drift: of a length class.
        recall: of its indexers, None where nothing was kept.
        lines: of memory, planned and held.
    """

    name: str
    ok: bool
    error: float
    limit: float
    problems: tuple[str, ...] = ()
    collectives: tuple[int, ...] = ()
    syncs: int = 0
    late_compiles: int = 0
    seconds: float = 0.0
    drift: Drift | None = None
    recall: Recall | None = None
    lines: tuple[MemoryLine, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The case with the fixed keys of every command's cases; JSON knows no infinity: null."""
        return asdict(self, dict_factory=lambda items: _finite(dict(items)))


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }


def judge(
    configuration: Configuration,
    results: Mapping[str, EngineResult],
    prompts: Sequence[Prompt],
    recalls: Mapping[str, Recall] | None = None,
) -> list[Case]:
    """A configuration's cases: how it ran, and its drift in each length class.

    Args:
        configuration: what is judged.
        results: of all engines, by name.
        prompts: what they served.
        recalls: of its indexers, by length class.
    """
    result = results[configuration.name]
    one, two = (results[configuration.baseline(tp).name] for tp in (1, 2))
    if result.failure is not None:
        return [conduct(configuration, result)]
    cases = [conduct(configuration, result)]
    failed = [failed_case(base.spec.name, base) for base in (one, two) if base.failure is not None]
    if failed:
        return cases + failed
    return cases + _drifts(configuration, result, one, two, prompts, recalls or {})


def failed_case(name: str, result: EngineResult) -> Case:
    """An engine that did not run."""
    return Case(
        f"{name}: runs",
        ok=False,
        error=1,
        limit=0,
        problems=(result.failure or "",),
        seconds=result.seconds,
    )


def conduct(configuration: Configuration, result: EngineResult) -> Case:
    """How an engine ran: late compilations, waits, collectives, monitors and buffers."""
    if result.failure is not None:
        return failed_case(configuration.name, result)
    problems = []
    for rank in result.ranks:
        number, engine = rank["rank"], rank["engine"]
        if result.spec.strict and engine["jit_monitor"] != "error":
            problems.append(
                f"rank {number}: vLLM's JIT monitor was {engine['jit_monitor']}, not on."
            )
        if result.spec.strict and engine["sync_check"] != "error":
            problems.append(f"rank {number}: vLLM's sync check was {engine['sync_check']}, not on.")
        if rank["before"]["buffers"] != rank["after"]["buffers"]:
            problems.append(
                f"rank {number}: buffers moved from {rank['before']['buffers']} to "
                f"{rank['after']['buffers']}."
            )
        problems += [
            f"rank {number}: {what} was compiled late." for what in _of_ours(rank["late_compiles"])
        ]
        problems += [
            f"rank {number}: {what} waited for the GPU." for what in _of_ours(rank["syncs"])
        ]
        if configuration.ours:
            problems += [
                f"rank {number}: {impl} served, which is not this package's."
                for impl in engine["impls"]
                if not impl.startswith(f"{OURS}.")
            ]
    calls = [rank["collectives"] for rank in result.ranks]
    counts = tuple(map(len, calls))
    if (difference := _first_difference(calls)) is not None:
        problems.append(difference)
    if configuration.mtp:
        drafted, accepted = (result.ranks[0]["metrics"][key] for key in ("drafted", "accepted"))
        if not 0 < accepted < drafted:
            problems.append(
                f"{accepted:.0f} of {drafted:.0f} drafted tokens were accepted; both kinds must "
                "occur."
            )
    return Case(
        f"{configuration.name}: runs",
        ok=not problems,
        error=len(problems),
        limit=0,
        problems=tuple(problems),
        collectives=counts,
        syncs=max(len(_of_ours(rank["syncs"])) for rank in result.ranks),
        late_compiles=max(len(_of_ours(rank["late_compiles"])) for rank in result.ranks),
        seconds=result.seconds,
    )


def _first_difference(calls: Sequence[Sequence[tuple[str, Sequence[int]]]]) -> str | None:
    """What two ranks called where they first differ, None where no two do.

    Two ranks must agree on the collectives that both take part in. Others are none of theirs: under
    PCP with DCP above it, TP groups gather the queries of as many rows as their PCP rank has.

    Args:
        calls: of each rank, the collectives that it called, and the ranks of their groups.
    """
    for one, two in itertools.combinations(range(len(calls)), 2):
        shared = (
            [call for call, ranks in calls[rank] if peer in ranks]
            for rank, peer in ((one, two), (two, one))
        )
        pairs = itertools.zip_longest(*shared, fillvalue="nothing more")
        for number, (first, second) in enumerate(pairs, 1):
            if first != second:
                return (
                    f"the collectives of ranks {one} and {two} differ from number {number} of "
                    f"theirs on: rank {one} {first}; rank {two} {second}."
                )
    return None


def _of_ours(noted: Sequence[Sequence[str]]) -> list[str]:
    return [what for owner, what in noted if owner == OURS]


def judge_outside(
    configuration: Configuration,
    results: Mapping[str, EngineResult],
    asked: Sequence[int],
    reference: np.ndarray,
) -> list[Case]:
    """How far a configuration is from HF in float32, as a multiple of how far TP1 is.

    Args:
        configuration: of a bf16 cache.
        results: of all engines, by name.
        asked: numbers of the prompts that the reference answered.
        reference: ``[N, scored tokens]`` behind each prompt.
    """
    result, one = results[configuration.name], results[configuration.baseline(1).name]
    if result.failure is not None or one.failure is not None:
        return []  # said already
    ours, truth = (np.asarray(r.ranks[0]["scores"])[:, 0] for r in (result, one))
    drift = compare(
        np.array([distance(ours[i], hf) for i, hf in zip(asked, reference, strict=True)]),
        np.array([distance(truth[i], hf) for i, hf in zip(asked, reference, strict=True)]),
    )
    problem = (
        f"log-probabilities are {drift.ratio:.2f} times as far from HF's as TP1's are (95 % "
        f"interval {drift.low:.2f} to {drift.high:.2f}, accepted {DRIFT_LIMIT})."
    )
    return [
        Case(
            f"{configuration.name}: against HF in float32",
            drift.ok,
            drift.high,
            DRIFT_LIMIT,
            () if drift.ok else (problem,),
            drift=drift,
        )
    ]


def _drifts(
    configuration: Configuration,
    result: EngineResult,
    one: EngineResult,
    two: EngineResult,
    prompts: Sequence[Prompt],
    recalls: Mapping[str, Recall],
) -> list[Case]:
    ours, truth, noise = (r.ranks[0]["scores"] for r in (result, one, two))
    cases = []
    by_class: dict[str, list[int]] = {}
    for index in sorted(range(len(prompts)), key=lambda i: len(prompts[i].tokens)):
        by_class.setdefault(prompts[index].length_class, []).append(index)
    for name, chosen in by_class.items():  # the shortest class first
        title = f"{configuration.name}: {name} tokens"
        try:
            drift = compare(distances(ours, truth, chosen), distances(noise, truth, chosen))
        except ValueError as error:
            cases.append(Case(title, False, 1, 0, (f"not comparable with TP1: {error}.",)))
            continue
        problem = (
            f"log-probabilities are {drift.ratio:.2f} times as far from TP1's as TP2's are (95 % "
            f"interval {drift.low:.2f} to {drift.high:.2f}, accepted {DRIFT_LIMIT})."
        )
        cases.append(
            Case(
                title,
                drift.ok,
                drift.high,
                DRIFT_LIMIT,
                () if drift.ok else (problem,),
                drift=drift,
                recall=recalls.get(name),
            )
        )
    return cases


def distances(
    scores: Sequence[Scores], reference: Sequence[Scores], prompts: Sequence[int]
) -> np.ndarray:
    """Of each prompt.

    Raises:
        ValueError: the scores of a prompt have another shape or are no numbers; says of which.
    """
    found = []
    for index in prompts:
        try:
            found.append(distance(np.asarray(scores[index]), np.asarray(reference[index])))
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from None
    return np.array(found)
