"""How ``plan`` writes."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from ..planner.compare import Difference
from ..planner.figures import FiguresPlan
from ..planner.lines import Counted, Line
from ..planner.outcome import Outcome
from ..planner.plan import Plan
from ..planner.request import Request
from . import options

_GIB = 1 << 30
_SECTIONS = {
    Counted.BUDGET: "counted by vLLM's profiling",
    Counted.OUTSIDE: "beside the requested share",
    Counted.MOMENT: "the same, for a moment",
}


def print_plan(request: Request, answer: Plan) -> None:
    """A plan with its figures, whether it works or not."""
    out = options.console()
    served = answer.served_by or "stock vLLM, as without DCP"
    out.print(
        f"{request.model} on {request.gpu}: tp {request.tp}, pcp {request.pcp}, dcp {request.dcp}, "
        f"{answer.kv_cache_dtype} cache, served by {served}."
    )
    out.print(_lines(answer))
    if answer.ours is not None and answer.stock is not None:
        out.print(_result(answer, answer.ours, answer.stock))
    w = answer.workspace
    if answer.served_by and w.total_bytes:
        out.print(
            f"Attention workspace: {w.total_bytes:,} bytes ({w.total_bytes / _GIB:.3f} GiB), "
            f"{w.tokens_per_launch:,} tokens a launch at {w.heads} heads, {w.launches} for "
            f"{request.max_num_batched_tokens:,} tokens; stock vLLM's: {w.stock_total_bytes:,} "
            "bytes, one launch."
        )
    if any(line.is_estimate for line in answer.lines):
        out.print("~ is an estimate, with its range; all other figures follow from vLLM's code.")
    for sentence in (*answer.notes, *answer.warnings):
        out.print(sentence)
    if answer.flags:
        out.print("Flags:", " ".join(answer.flags), soft_wrap=True)


def _lines(answer: Plan) -> Table:
    table = Table("GiB of a rank")
    table.add_column("vllm-dcp-mla", justify="right")
    table.add_column("range", justify="right")
    table.add_column("stock vLLM", justify="right")
    for counted, title in _SECTIONS.items():
        table.add_section()
        table.add_row(title)
        for line in answer.lines:
            if line.counted is counted:
                table.add_row(f"  {line.name}", _size(line), _range(line), _stock(line))
    return table


def _size(line: Line) -> str:
    return f"{'~' if line.is_estimate else ''}{_gib(line.bytes)}"


def _range(line: Line) -> str:
    return f"{_gib(line.low)} - {_gib(line.high)}" if line.is_estimate else ""


def _stock(line: Line) -> str:
    moved = line.stock_counted is not line.counted and line.stock_bytes
    return f"{_gib(line.stock_bytes)}{' (not counted)' if moved else ''}"


def _result(answer: Plan, ours: Outcome, stock: Outcome) -> Table:
    table = Table("result")
    table.add_column("vllm-dcp-mla", justify="right")
    table.add_column("stock vLLM", justify="right")

    def row(name: str, of_ours: str, of_stock: str) -> None:
        table.add_row(name, of_ours, of_stock)

    both = (ours, stock)
    row("GPU, GiB", *(_gib(o.budget.total_bytes) for o in both))
    row("requested share, GiB", *(_gib(o.budget.requested_bytes) for o in both))
    row("KV cache, GiB", *(_gib(o.kv.budget_bytes) for o in both))
    row("bytes a token, on the rank that stores it", *(f"{o.kv.bytes_per_token:,}" for o in both))
    if (rows := answer.rows) is not None:
        mla = f"{rows.mla_layers} layers x {rows.mla_row_bytes}"
        row("  MLA rows", mla, mla)
        index = f"{rows.index_layers} layers x {rows.index_row_bytes}"
        row("  indexer keys, sharded with them", index, index)
    row("tokens of a rank", *(f"{o.kv.tokens_per_rank:,}" for o in both))
    row("tokens of requests, all ranks together", *(f"{o.kv.tokens_logical:,}" for o in both))
    row("  with estimates at their low ends", *(f"{o.kv_at_most.tokens_logical:,}" for o in both))
    context = f"requests of {answer.context:,} tokens at once"
    row(context, *(f"{o.kv.requests(answer.context):.2f}" for o in both))
    row("free at the worst moment, GiB", *(_gib(o.budget.free_bytes) for o in both))
    row("largest safe utilisation", *(_safe(o.budget.largest_utilization) for o in both))
    if answer.max_tokens:
        row("largest --max-num-batched-tokens", f"{answer.max_tokens:,}", "")
    if answer.kv_gain:
        row("tokens beside the same GPUs without DCP", f"x {answer.kv_gain:.2f}", "")
    row(f"checkpoint, GB ({answer.weights_from})", f"{answer.checkpoint_bytes / 1e9:,.1f}", "")
    return table


def _safe(utilization: float | None) -> str:
    return "none" if utilization is None else f"{utilization:.4f}"


def print_figures(answer: FiguresPlan) -> None:
    """A plan from the figures of a log."""
    out, budget = options.console(), answer.budget
    if budget is None:
        return
    table = Table("GiB of a GPU")
    table.add_column("", justify="right")
    for name, size in (
        ("total", budget.total_bytes),
        (f"requested with --gpu-memory-utilization {budget.utilization:g}", budget.requested_bytes),
        ("counted by profiling, without KV cache", budget.non_kv_bytes),
        ("CUDA graphs", budget.graphs_bytes),
        ("KV cache", budget.kv_bytes),
        ("needed beside the requested share", budget.outside_bytes),
        ("free at the worst moment", budget.free_bytes),
    ):
        table.add_row(name, _gib(size))
    out.print(table)
    out.print(
        f"Largest safe utilisation: {_safe(budget.largest_utilization)}. Without counting graphs, "
        f"{budget.without_graphs:.4f} gives the same; {budget.to_keep_kv:.4f} keeps the KV cache "
        "of before they were counted."
    )
    for note in answer.notes:
        out.print(note)


def print_sweep(flag: str, rows: list[dict[str, Any]]) -> None:
    """One line a value."""
    out = options.console()
    table = Table(f"--{flag}")
    for name in ("fits", "KV GiB", "tokens, all ranks", "requests", "free GiB", "safe utilisation"):
        table.add_column(name, justify="right")
    for row in rows:
        memory, kv = row["memory"], row["kv"]
        if memory is None:
            table.add_row(row["value"], "no")
            continue
        tokens, requests = kv["tokens_logical"], kv["requests"]
        table.add_row(
            row["value"],
            "yes" if row["ok"] else "no",
            _gib(memory["kv_bytes"]),
            "" if tokens is None else f"{tokens:,}",
            "" if requests is None else f"{requests:.2f}",
            _gib(memory["free_bytes"]),
            _safe(row["utilization"]["max_safe"]),
        )
    out.print(table)
    for row in rows:
        short = (problem.partition(" The largest lines:")[0] for problem in row["problems"])
        options.print_problems([f"--{flag} {row['value']}: {problem}" for problem in short])


def print_differences(files: tuple[str, str], found: list[Difference]) -> None:
    """One line a difference."""
    out = options.console()
    if not found:
        out.print(f"{files[0]} and {files[1]} plan the same.")
        return
    table = Table("", *files, "change")
    for difference in found:
        change = difference.change
        table.add_row(
            difference.name,
            _value(difference.before),
            _value(difference.after),
            "" if change is None else f"{'+' if change > 0 else ''}{_value(change)}",
        )
    out.print(table)


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _gib(size: float) -> str:
    return f"{size / _GIB:,.3f}"
