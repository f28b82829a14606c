"""What lines add up to: the KV budget, what it holds, and whether it works."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .budget import Budget
from .kv_cache import KvCapacity
from .lines import Counted, Line

GIB = 1 << 30
_NAMED = 3  # lines that a refusal names


@dataclass(frozen=True, slots=True)
class Outcome:
    """One column of a plan, ours or stock's.

    Attributes:
        budget: memory of a GPU, estimates at their ``bytes``.
        kv: what the budget holds.
        kv_at_most: the same with estimates at their low ends.
        worst: the budget with estimates at their high ends.
    """

    budget: Budget
    kv: KvCapacity
    kv_at_most: KvCapacity
    worst: Budget


def add_up(
    lines: Iterable[Line],
    total_bytes: int,
    utilization: float,
    make_kv: Callable[[int], KvCapacity],
    *,
    stock: bool = False,
) -> Outcome:
    """Adds up one column.

    Args:
        lines: all but the KV cache.
        total_bytes: memory of the GPU.
        utilization: ``--gpu-memory-utilization``.
        make_kv: the capacity of a budget in bytes.
        stock: whether stock vLLM's column is meant.
    """
    lines = list(lines)

    def budget(end: str) -> Budget:
        sizes = {line.key: _size(line, end, stock) for line in lines}
        where = {line.key: line.stock_counted if stock else line.counted for line in lines}

        def total(counted: Counted) -> int:
            return sum(sizes[key] for key, w in where.items() if w is counted)

        graphs, autotune = sizes.get("graphs", 0), sizes.get("autotune", 0)
        # A step's own moments may use what the profiled step left free.
        step = max(total(Counted.MOMENT) - autotune - sizes.get("peak", 0), 0)
        return Budget(
            total_bytes=total_bytes,
            utilization=utilization,
            non_kv_bytes=total(Counted.BUDGET) - graphs,
            graphs_bytes=graphs,
            outside_bytes=total(Counted.OUTSIDE) + max(autotune, step),
        )

    counted = budget("bytes")
    return Outcome(
        budget=counted,
        kv=make_kv(counted.kv_bytes),
        kv_at_most=make_kv(budget("low").kv_bytes),
        worst=budget("high"),
    )


def _size(line: Line, end: str, stock: bool) -> int:
    if stock and line.stock_bytes != line.bytes:  # such lines are exact
        return line.stock_bytes
    return getattr(line, end)


def refusals(outcome: Outcome, lines: list[Line], max_model_len: int) -> list[str]:
    """Why the plan does not work, one sentence each; empty when it does."""
    budget, kv, problems = outcome.budget, outcome.kv, []
    if budget.kv_bytes <= 0:
        problems.append(_no_kv(budget, lines))
    elif kv.requests(max_model_len) < 1:
        way_out = f"use {kv.tokens_logical} or less"
        if not kv.tokens_logical:
            way_out = "not one block fits: use a smaller --block-size, or make room"
        problems.append(
            f"The KV cache holds {kv.tokens_logical:,} tokens, not one request of --max-model-len "
            f"{max_model_len}; {way_out}. {_largest(lines, Counted.BUDGET)}"
        )
    if budget.free_bytes < 0:
        problems.append(_no_room(budget, lines))
    return problems


def warnings(outcome: Outcome) -> list[str]:
    """What may go wrong at the high ends of the estimates."""
    worst, said = outcome.worst, []
    if worst.kv_bytes <= 0 < outcome.budget.kv_bytes:
        said.append(
            f"At the high ends of the estimates {gib(-worst.kv_bytes)} are missing for a KV cache."
        )
    if worst.free_bytes < 0 <= outcome.budget.free_bytes:
        safe = worst.largest_utilization
        said.append(
            f"At the high ends of the estimates {gib(-worst.free_bytes)} are missing beside the "
            "requested share; "
            + (
                "no --gpu-memory-utilization leaves room for both then."
                if safe is None
                else f"--gpu-memory-utilization {safe:.4g} is safe even then."
            )
        )
    return said


def gib(size: float) -> str:
    """Bytes as GiB, with a sign where they are negative."""
    return f"{size / GIB:.2f} GiB"


def _no_kv(budget: Budget, lines: list[Line]) -> str:
    said = (
        f"The KV budget is {gib(budget.kv_bytes)}: --gpu-memory-utilization {budget.utilization:g} "
        f"of {gib(budget.total_bytes)} is {gib(budget.requested_bytes)}, and "
        f"{gib(budget.non_kv_bytes)} are counted without KV cache and {gib(budget.graphs_bytes)} "
        "for CUDA graphs."
    )
    if budget.largest_utilization is not None:
        enough = budget.utilization_for_any_kv
        said += f" More than --gpu-memory-utilization {enough:g} would leave some."
    else:
        said += " No safe --gpu-memory-utilization leaves any."
    return f"{said} {_largest(lines, Counted.BUDGET)}"


def _no_room(budget: Budget, lines: list[Line]) -> str:
    safe = budget.largest_utilization
    way_out = "none leaves room for both" if safe is None else f"use {safe:g} or less"
    return (
        f"--gpu-memory-utilization {budget.utilization:g} leaves {gib(budget.slack_bytes)} of the "
        f"GPU, but {gib(budget.outside_bytes)} are needed there; {way_out}. "
        f"{_largest(lines, Counted.OUTSIDE, Counted.MOMENT)}"
    ).rstrip()


def _largest(lines: list[Line], *counted: Counted) -> str:
    largest = sorted((x for x in lines if x.counted in counted), key=lambda x: -x.bytes)[:_NAMED]
    if not largest:
        return ""
    named = "; ".join(
        f"{line.name}, {gib(line.bytes)}" + (f", smaller with {line.shrink}" if line.shrink else "")
        for line in largest
    )
    return f"The largest lines: {named}."
