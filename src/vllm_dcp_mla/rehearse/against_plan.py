"""What the ranks of an engine hold beside what ``plan`` says of it: arithmetic only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..compat.libraries import libraries_here
from ..models import load_config
from ..planner.lines import Counted, Line
from ..planner.plan import Plan, make_plan
from ..planner.request import DEFAULT_UTILIZATION, LOCAL, Request
from ..settings import load_settings, user_workspace_bytes
from ..simulate.gpus import Gpu
from .configuration import Configuration
from .engine import EngineSpec, llm_arguments
from .judge import Case
from .schedule import EngineResult

#: Lines that follow from sizes alone: they agree to the byte.
TO_THE_BYTE = frozenset(
    {
        *("slab", "scratch", "partials", "pcp_gather", "gather", "block_tables"),
        *("indexer_tables", "topk", "index_groups", "kv.block_bytes"),
    }
)
#: How far all compared lines together may be apart. Weights are what a checkpoint's headers say;
#: vLLM adds a scale here and there.
SUM_TOLERANCE = 0.02
#: What NCCL, cuBLAS and compiled kernels take while vLLM profiles is in no line of a plan: this
#: share of the KV budget, beside the range of the plan's own estimates.
KV_TOLERANCE = 0.02
_WEIGHTS = "weights"
_WORKSPACE = frozenset({"slab", "scratch"})
_BLOCK, _TOKENS = "kv.block_bytes", "kv.tokens_logical"
#: What a rank holds and no plan lists, as a reader should call it.
_UNPLANNED = {
    "shared_workspace": "shared workspace, experts' share included",
    "mla_state": "MLA builders' other buffers",
}

Judged = Literal["bytes", "sum", "range"]


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One line, side by side.

    Attributes:
        key: the plan's.
        name: what it is.
        planned: bytes of a rank (``kv.tokens_logical``: tokens), None where no plan has it.
        held: of each rank, None where it has none.
        judged: to the byte, within the sum, within a range, or None: listed only. What is to the
            byte and of no rank is wrong.
        not_read: why ranks have no figure, empty where they need none.
    """

    key: str
    name: str
    planned: int | None
    held: tuple[int | None, ...]
    judged: Judged | None
    not_read: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All lines of an engine.

    Attributes:
        lines: side by side.
        problems: one sentence each.
        off_bytes: the largest difference of a line that agrees to the byte.
        off_share: the largest difference of the sum, as a share of the planned one.
    """

    lines: tuple[MemoryLine, ...] = ()
    problems: tuple[str, ...] = ()
    off_bytes: int = 0
    off_share: float = 0.0


def judge_memory(configuration: Configuration, result: EngineResult) -> list[Case]:
    """What every rank holds beside the plan of the same engine; nothing of one that failed."""
    if result.failure is not None:
        return []
    found = compare(result.spec, result.ranks)
    return [
        Case(
            f"{configuration.name}: memory against plan",
            not found.problems,
            found.off_bytes or found.off_share,
            0 if found.off_bytes else SUM_TOLERANCE,
            found.problems,
            lines=found.lines,
        )
    ]


def compare(spec: EngineSpec, ranks: Sequence[Mapping[str, Any]]) -> Comparison:
    """Plans the engine's checkpoint with the engine's flags and compares every rank with it.

    Args:
        spec: the engine; its checkpoint is still there.
        ranks: what each rank answered.
    """
    held = [rank["held"] for rank in ranks]
    gpu, engine = held[0]["gpu"], ranks[0]["engine"]
    plan = plan_of(
        spec,
        Gpu(gpu["name"], tuple(gpu["arch"]), gpu["sms"], gpu["memory_bytes"]),
        engine["kv_block_tokens"],
    )
    if plan.ours is None:
        return Comparison(problems=tuple(f"plan: {problem}" for problem in plan.problems))
    lines = side_by_side(plan, [h["lines"] for h in held], [h["not_read"] for h in held])
    comparison = judge_lines(lines)
    if spec.kv_cache_bytes is not None:  # nothing was profiled
        return comparison
    tokens = [
        rank["engine"]["kv_blocks"] * rank["engine"]["kv_block_tokens"] * spec.dcp for rank in ranks
    ]
    line, problems = judge_budget(plan, tokens)
    return Comparison(
        (*comparison.lines, line),
        (*comparison.problems, *problems),
        comparison.off_bytes,
        comparison.off_share,
    )


def plan_of(spec: EngineSpec, gpu: Gpu, block_size: int) -> Plan:
    """The plan of an engine's own checkpoint.

    Args:
        spec: the engine.
        gpu: of its ranks.
        block_size: tokens of a cache block on a rank, as vLLM chose it.
    """
    arguments = llm_arguments(spec)
    request = Request(
        model=spec.model,
        config=load_config(spec.model),
        gpu=LOCAL,
        tp=spec.tp,
        pcp=spec.pcp,
        dcp=spec.dcp,
        kv_cache_dtype=spec.kv_cache_dtype,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        comm=spec.comm if spec.dcp > 1 else None,
        max_model_len=spec.max_model_len,
        max_num_seqs=arguments["max_num_seqs"],
        block_size=block_size,
        # Where ranks share a GPU, vLLM sizes nothing by its own.
        utilization=float(DEFAULT_UTILIZATION) if spec.shared else spec.utilization,
        mtp=spec.mtp,
        eager=spec.graphs == "none",
    )
    settings = load_settings(arguments["additional_config"])
    return make_plan(request, gpu, libraries_here(), settings, user_workspace_bytes())


def side_by_side(
    plan: Plan, held: Sequence[Mapping[str, int]], not_read: Sequence[Mapping[str, str]]
) -> tuple[MemoryLine, ...]:
    """Every line that the plan or a rank has, but what a step only holds for a moment.

    What a plan knows to the byte, ranks must hold: a plan has no line for what a configuration does
    without.

    Args:
        plan: with lines.
        held: of each rank, bytes by key.
        not_read: of each rank, reasons by key.
    """
    planned = {line.key: line for line in _merged(plan.lines)}
    names = {key: line.name for key, line in planned.items()}
    sizes = {key: line.bytes for key, line in planned.items()}
    if plan.ours is not None:
        names[_BLOCK], sizes[_BLOCK] = "KV cache, bytes of a block", plan.ours.kv.block_bytes
    # A workspace that is made after profiling is that of stock's class, where no reader looks.
    unread = {key for key in _WORKSPACE & set(planned) if not planned[key].profiled}
    keys = dict.fromkeys([*sizes, *(key for rank in (*held, *not_read) for key in rank)])
    lines = []
    for key in keys:
        found = tuple(rank.get(key) for rank in held)
        reasons = dict.fromkeys(rank[key] for rank in not_read if key in rank)
        judged: Judged | None = None
        if key in sizes and any(size is not None for size in found):
            judged = "bytes" if key in TO_THE_BYTE else "sum"
        elif sizes.get(key) and key in TO_THE_BYTE - unread and not reasons:
            judged = "bytes"
        if key in planned and planned[key].is_estimate:
            judged = None
        name = names.get(key) or _UNPLANNED.get(key, key)
        lines.append(MemoryLine(key, name, sizes.get(key), found, judged, "; ".join(reasons)))
    return tuple(lines)


def _merged(lines: Iterable[Line]) -> list[Line]:
    """What stays allocated; weights of all kinds as one line."""
    kept = [line for line in lines if line.counted is not Counted.MOMENT]
    weights = [line for line in kept if line.key.startswith(f"{_WEIGHTS}_")]
    others = [line for line in kept if line not in weights]
    if not weights:
        return others
    total, stock = sum(x.bytes for x in weights), sum(x.stock_bytes for x in weights)
    where = weights[0]
    merged = Line(
        _WEIGHTS, "weights", total, stock, where.counted, where.stock_counted, total, total
    )
    return [merged, *others]


def judge_lines(lines: Sequence[MemoryLine]) -> Comparison:
    """Those to the byte one by one, and all compared ones together.

    Bytes of a block are no part of the sum: how many blocks there are is not the plan's question.
    """
    problems: list[str] = []
    off_bytes, off_share = 0, 0.0
    exact = [line for line in lines if line.judged == "bytes"]
    if not exact:
        problems.append("no line was compared to the byte; see what was not read.")
    for line in exact:
        planned = line.planned or 0
        if all(got is None for got in line.held):
            off_bytes = max(off_bytes, planned)
            problems.append(
                f"no rank holds {line.name} ({line.key}), planned were {planned:,} bytes of each."
            )
            continue
        for rank, got in enumerate(line.held):
            if got == planned or (got is None and line.not_read):
                continue
            off_bytes = max(off_bytes, abs((got or 0) - planned))
            problems.append(
                f"{line.name} ({line.key}): rank {rank} holds {got or 0:,} bytes, planned were "
                f"{planned:,}."
            )
    for rank, (planned, held) in enumerate(totals(lines)):
        share = _apart(planned, held)
        off_share = max(off_share, share)
        if share > SUM_TOLERANCE:
            problems.append(
                f"the compared lines together: rank {rank} holds {held:,} bytes, planned were "
                f"{planned:,}, {share:.1%} apart, accepted {SUM_TOLERANCE:.0%}."
            )
    return Comparison(tuple(lines), tuple(problems), off_bytes, off_share)


def totals(lines: Sequence[MemoryLine]) -> list[tuple[int, int]]:
    """Planned and held bytes of each rank, over the lines that it has and that are compared."""
    ranks = len(lines[0].held) if lines else 0
    pairs = [
        [
            (line.planned or 0, got)
            for line in _summed(lines)
            if (got := line.held[rank]) is not None
        ]
        for rank in range(ranks)
    ]
    return [(sum(p for p, _ in rank), sum(h for _, h in rank)) for rank in pairs]


def _summed(lines: Sequence[MemoryLine]) -> list[MemoryLine]:
    return [
        line
        for line in lines
        if line.judged in ("bytes", "sum")
        and line.key != _BLOCK
        and any(got is not None for got in line.held)
    ]


def _apart(planned: int, held: int) -> float:
    return abs(held - planned) / planned if planned else float(held > 0)


def judge_budget(plan: Plan, tokens: Sequence[int]) -> tuple[MemoryLine, list[str]]:
    """The KV cache that vLLM sized beside the planned one.

    Args:
        plan: of an engine that has its GPUs for itself.
        tokens: logical ones, as each rank has them.
    """
    assert plan.ours is not None, "a plan with lines"
    kv = plan.ours.kv
    # Beside shares of the budget, what the plan itself leaves open.
    ends = [x for x in plan.lines if x.is_estimate and x.counted is Counted.BUDGET]
    open_bytes = sum(max(line.high - line.bytes, line.bytes - line.low) for line in ends)
    share = KV_TOLERANCE + open_bytes / max(kv.budget_bytes, 1)
    planned = kv.tokens_logical
    problems = [
        f"the KV cache: rank {rank} holds {got:,} tokens, planned were {planned:,}, accepted "
        f"{share:.1%} apart (the plan's estimates, and {KV_TOLERANCE:.0%} that no line counts)."
        for rank, got in enumerate(tokens)
        if abs(got - planned) > share * planned
    ]
    return MemoryLine(
        _TOKENS, "KV cache, logical tokens", planned, tuple(tokens), "range"
    ), problems


def summary(lines: Sequence[MemoryLine]) -> str:
    """One sentence for people."""
    exact = [line.key for line in lines if line.judged == "bytes"]
    share = max((_apart(*total) for total in totals(lines)), default=0.0)
    said = (
        f"compared to the byte: {', '.join(exact) or 'nothing'}; {len(_summed(lines))} lines "
        f"together are {share:.2%} apart"
    )
    missing = [f"{line.key} ({line.not_read})" for line in lines if line.not_read]
    return f"{said}; not read: {', '.join(missing)}." if missing else f"{said}."
