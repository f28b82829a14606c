"""A soak's cases: how it ran, its memory, and whether answers depended on the company."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .configuration import Configuration
from .drift import DRIFT_LIMIT, Drift, compare
from .judge import Case, conduct, distances, failed_case
from .schedule import EngineResult

#: States of a soak, before and after each round, that can show growth.
_FEWEST_STATES = 5
#: Growth in bytes in the second half of a soak. Torch takes segments of 2 or 20 MiB, and a step
#: more crowded than any before may need one more; a leak needs one after the other.
_ACCEPTED_GROWTH = {
    "what tensors hold": 0,
    "memory outside of torch": 0,
    "what torch keeps": 20 << 20,
}


def judge_soak(configuration: Configuration, results: Mapping[str, EngineResult]) -> list[Case]:
    """A soak's cases: how it ran, its memory, and whether answers depended on the company.

    Args:
        configuration: what was soaked.
        results: of the soak and of its baselines, by name.
    """
    result = results[configuration.name]
    bases = [results[configuration.baseline(tp).name] for tp in (1, 2)]
    failed = [failed_case(r.spec.name, r) for r in (result, *bases) if r.failure is not None]
    if failed:
        return failed
    return [
        conduct(configuration, result),
        _soak_memory(configuration, result),
        _soak_drift(configuration, result, *bases),
    ]


def _soak_memory(configuration: Configuration, result: EngineResult) -> Case:
    seen = [rank["soak"]["states"] for rank in result.ranks]
    enough = len(seen[0]) >= _FEWEST_STATES
    growths = [_growth(s, _on_the_same_gpu(s, seen)) for s in seen] if enough else []
    problems = [
        f"rank {number}: {what} grew by {size:,} bytes in the second half, of which "
        f"{_ACCEPTED_GROWTH[what]:,} are accepted."
        for number, growth in enumerate(growths)
        for what, size in growth.items()
        if size > _ACCEPTED_GROWTH[what]
    ]
    if not enough:
        problems.append(
            f"{len(seen[0]) - 1} of the {_FEWEST_STATES - 1} rounds that show growth were served; "
            "soak for longer."
        )
    problems += [
        f"rank {number}: buffers moved."
        for number, states in enumerate(seen)
        if any(state["buffers"] != states[0]["buffers"] for state in states)
    ]
    return Case(
        f"{configuration.name}: soak memory",
        not problems,
        max((size for growth in growths for size in growth.values()), default=0),
        max(_ACCEPTED_GROWTH.values()),
        tuple(problems),
    )


def _on_the_same_gpu(
    states: Sequence[Mapping[str, Any]], seen: Sequence[Sequence[Mapping[str, Any]]]
) -> list[Sequence[Mapping[str, Any]]]:
    return [other for other in seen if other[0]["gpu"] == states[0]["gpu"]]


def _growth(
    states: Sequence[Mapping[str, Any]], sharing: Sequence[Sequence[Mapping[str, Any]]]
) -> dict[str, int]:
    """Bytes by which a rank's memory between rounds grew in the second half of a soak.

    What leaks raises the least that a rank holds while it serves nothing. What the allocator keeps
    follows the most crowded step so far instead.

    Args:
        states: of the rank.
        sharing: of all ranks on its GPU, itself included.
    """
    half = len(states) // 2
    live = [state["allocated_bytes"] for state in states[half:]]
    kept = [state["reserved_bytes"] for state in states[half:]]
    outside = [
        together[0]["device_bytes"] - sum(state["reserved_bytes"] for state in together)
        for together in zip(*(states[half:] for states in sharing), strict=True)
    ]
    return {
        "what tensors hold": _rise(live),
        "memory outside of torch": _rise(outside),
        "what torch keeps": kept[-1] - kept[0],
    }


def _rise(sizes: Sequence[int]) -> int:
    """By how much the least of them grew from their first half to their second."""
    half = len(sizes) // 2
    return min(sizes[half:]) - min(sizes[:half])


def _soak_drift(
    configuration: Configuration, result: EngineResult, one: EngineResult, two: EngineResult
) -> Case:
    soak, rank = result.ranks[0]["soak"], result.ranks[0]
    truth, noise = (r.ranks[0]["scores"] for r in (one, two))
    seen = sorted({index for index, _ in soak["distances"]})
    problems = []
    for what, count in (
        ("served to its end", len(seen)),
        ("preempted", rank["metrics"]["preemptions"]),
        ("aborted", soak["aborted"]),
    ):
        if not count:
            problems.append(f"no request was {what}; the soak must see some.")
    drift: Drift | None = None
    if seen:
        means = [np.mean([d for i, d in soak["distances"] if i == index]) for index in seen]
        try:
            drift = compare(np.array(means), distances(noise, truth, seen))
        except ValueError as error:
            problems.append(f"TP2 is not comparable with TP1: {error}.")
    if drift is not None and not drift.ok:
        problems.append(
            f"in company, log-probabilities are {drift.ratio:.2f} times as far from those "
            f"alone as TP2's are from TP1's (95 % interval {drift.low:.2f} to "
            f"{drift.high:.2f}, accepted {DRIFT_LIMIT})."
        )
    return Case(
        f"{configuration.name}: {len(soak['distances'])} requests in {soak['steps']} steps, "
        f"{rank['metrics']['preemptions']:.0f} preempted, {soak['aborted']} aborted",
        not problems,
        drift.high if drift is not None else 0.0,
        DRIFT_LIMIT,
        tuple(problems),
        drift=drift,
    )
