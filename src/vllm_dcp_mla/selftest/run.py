"""All cases on all ranks, and what came of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..gather_plan import PAGE_ROWS
from ..models import load_config
from . import world
from .attention import StepResult, run_steps
from .batch import HEAD_DIM
from .cases import cases, pcp_cases, warm_up
from .subjects import subject_of

#: Largest accepted relative error of a token and head. Partial outputs and their weighted sum are
#: rounded to bf16, 2^-9 of an element each time; 0.006 was seen at 8 ranks.
ERROR_LIMIT = 0.015
_SEED = 20_260_901
_TOPK = 256  # the index conversion's Triton kernel runs interpreted: keep its rows short


@dataclass(frozen=True, slots=True)
class Case:
    """The outcome of one case over all ranks.

    Attributes:
        name: batch, exchange and interleave.
        ok: whether every rank was right, called the same collectives, and none waited for its GPU
            or compiled inside a metadata build.
        error: the largest error of a rank.
        limit: the largest accepted one.
        collectives: calls of each rank, in rank order.
        syncs: most waits for the GPU inside a rank's metadata builds; None on the CPU.
        late_compiles: most kernels that a rank compiled there; None on the CPU.
        seconds: wall time of the slowest rank.
    """

    name: str
    ok: bool
    error: float
    limit: float
    collectives: list[int] = field(default_factory=list)
    syncs: int | None = None
    late_compiles: int | None = None
    seconds: float = 0.0


def run_selftest(
    sizes: world.Sizes,
    interleaves: Sequence[int],
    device: str,
    gpu: str,
    fault: str | None,
    progress: Callable[[Case], None],
) -> list[Case]:
    """Runs every case and reports each as it is known.

    Args:
        sizes: parallel sizes; each TP rank holds its share of the heads.
        interleaves: tokens a rank stores before the next takes over, one run each.
        device: ``cpu`` or ``cuda``, as :func:`.world.prepare` was told.
        gpu: whose backend runs, a name of :data:`..simulate.gpus.GPUS`.
        fault: a planted fault of :data:`.faults.FAULTS`, or None.
        progress: called with each case.

    Raises:
        .world.RankError: a rank failed instead of answering.
    """
    model = {**load_config(world.MODEL), "index_topk": _TOPK}
    heads = sizes.heads
    outcome = []
    for run in _runs(sizes, interleaves):
        shapes = (
            pcp_cases(heads, sizes.pcp, sizes.dcp, run.interleave)
            if sizes.pcp > 1
            else cases(heads, sizes.dcp, run.interleave)
        )
        warmed = warm_up(heads, run.interleave) if device == "cuda" else ()
        ranks = world.run_ranks(
            sizes.num_ranks,
            run_steps,
            *((*warmed, *shapes), model, run.comm, sizes, _SEED, device, subject_of(gpu), fault),
            run.settings,
        )
        ranks = [results[len(warmed) :] for results in ranks]
        for shape, results in zip(shapes, zip(*ranks, strict=True), strict=True):
            case = _judge(f"{shape.name} ({run.name})", results)
            progress(case)
            outcome.append(case)
    return outcome


@dataclass(frozen=True, slots=True)
class _Run:
    """What ranks are started for once."""

    name: str
    comm: str
    interleave: int
    settings: dict[str, Any]


def _runs(sizes: world.Sizes, interleaves: Sequence[int]) -> list[_Run]:
    def run(comm: str, interleave: int, name: str = "", **settings: Any) -> _Run:
        return _Run(f"{comm}, interleave {interleave}{name}", comm, interleave, settings)

    if sizes.pcp == 1:
        # Without PCP vLLM offers both exchanges; the a2a path is shown once.
        return [*(run("ag_rs", i) for i in interleaves), run("a2a", interleaves[0])]
    # A few rows of each rank at a time, and results of a few tokens: contexts are cut everywhere.
    few = [
        run("ag_rs", i, ", in ranges", gather_limit_bytes=_few_rows(sizes, i)) for i in interleaves
    ]
    return [*few, run("ag_rs", interleaves[0], ", whole")]


def _few_rows(sizes: world.Sizes, interleave: int) -> int:
    """Bytes for some 100 rows of a bf16 cache in all, or one turn of every rank."""
    rows = max(128, sizes.dcp * interleave)
    return (rows + PAGE_ROWS) * 2 * HEAD_DIM


def _judge(name: str, results: Sequence[StepResult]) -> Case:
    error = max(result.error for result in results)
    alike = len({result.collectives for result in results}) == 1
    syncs = _most(result.builds.syncs for result in results)
    late_compiles = _most(result.builds.late_compiles for result in results)
    return Case(
        name,
        ok=alike and error <= ERROR_LIMIT and not syncs and not late_compiles,
        error=error,
        limit=ERROR_LIMIT,
        collectives=[len(result.collectives) for result in results],
        syncs=syncs,
        late_compiles=late_compiles,
        seconds=max(result.seconds for result in results),
    )


def _most(counts: Iterable[int | None]) -> int | None:
    """The largest count; None if none was taken."""
    return max((count for count in counts if count is not None), default=None)


def as_json(outcome: Sequence[Case]) -> dict[str, Any]:
    """The machine-readable outcome."""
    return {
        "ok": all(case.ok for case in outcome),
        "cases": [
            {
                "name": case.name,
                "ok": case.ok,
                "error": case.error,
                "limit": case.limit,
                "collectives": case.collectives,
                "syncs": case.syncs,
                "late_compiles": case.late_compiles,
                "seconds": round(case.seconds, 3),
            }
            for case in outcome
        ],
    }
