"""A plan as one JSON object; every key is there, whatever the answer is."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .budget import Budget
from .figures import FiguresPlan
from .lines import Line
from .outcome import Outcome
from .plan import Plan
from .request import Request


def plan_json(request: Request | None, plan: Plan) -> dict[str, Any]:
    """The machine-readable answer.

    Args:
        request: what was asked for, None where it could not be read.
        plan: the answer.
    """
    w = plan.workspace
    return {
        "ok": not plan.problems,
        "problems": plan.problems,
        "warnings": plan.warnings,
        "notes": plan.notes,
        "model": {
            "name": request.model if request else None,
            "checkpoint_bytes": plan.checkpoint_bytes or None,
            "weights_from": plan.weights_from or None,
        },
        "topology": {
            "tp": request.tp if request else None,
            "pcp": request.pcp if request else None,
            "dcp": request.dcp if request else None,
            "gpu": request.gpu if request else None,
            "kv_cache_dtype": plan.kv_cache_dtype if request else None,
        },
        "backend": plan.served_by,
        "workspace": {
            "heads": w.heads,
            "tokens_per_launch": w.tokens_per_launch,
            "slab_bytes": w.slab_bytes,
            "total_bytes": w.total_bytes,
            "stock_total_bytes": w.stock_total_bytes,
        },
        "lines": [_line(line) for line in plan.lines],
        "kv": _kv(plan),
        "utilization": _utilization(plan.ours.budget if plan.ours else None),
        "batch": {
            "requested": request.max_num_batched_tokens if request else None,
            "max_safe": plan.max_tokens,
        },
        "memory": _memory(plan.ours),
        "stock_memory": _memory(plan.stock),
        "flags": plan.flags,
    }


def figures_json(plan: FiguresPlan | None, problems: list[str]) -> dict[str, Any]:
    """The answer from figures of a log, with the keys of :func:`plan_json`."""
    empty = plan_json(None, Plan("", problems=problems))
    if plan is None or plan.budget is None:
        return empty
    budget = plan.budget
    return {
        **empty,
        "ok": not plan.problems,
        "problems": plan.problems,
        "notes": plan.notes,
        "lines": [
            {"key": key, "name": name, "bytes": size, "stock_bytes": size, "profiled": profiled}
            for key, name, size, profiled in (
                ("non_kv", "memory counted by profiling", budget.non_kv_bytes, True),
                ("graphs", "CUDA graphs", budget.graphs_bytes, True),
                ("outside", "needed beside the requested share", budget.outside_bytes, False),
            )
        ],
        "kv": {**empty["kv"], "budget_bytes": budget.kv_bytes},
        "utilization": _utilization(budget),
        "memory": _budget(budget),
    }


def _line(line: Line) -> dict[str, Any]:
    return {
        "key": line.key,
        "name": line.name,
        "bytes": line.bytes,
        "stock_bytes": line.stock_bytes,
        "profiled": line.profiled,
        "stock_profiled": line.stock_counted.value == "budget",
        "counted": line.counted.value,
        "estimate": line.is_estimate,
        "low_bytes": line.low,
        "high_bytes": line.high,
        "shrink": line.shrink,
    }


def _kv(plan: Plan) -> dict[str, Any]:
    keys = (
        *("bytes_per_token", "budget_bytes", "tokens_per_rank", "tokens_logical", "block_tokens"),
        *("block_size", "block_bytes", "context", "requests", "gain", "tokens_logical_at_most"),
        *("stock_budget_bytes", "stock_tokens_logical", "rows"),
    )
    if plan.ours is None or plan.stock is None or plan.rows is None:
        return dict.fromkeys(keys)
    kv, stock = plan.ours.kv, plan.stock.kv
    values = (
        *(kv.bytes_per_token, kv.budget_bytes, kv.tokens_per_rank, kv.tokens_logical),
        *(kv.block_tokens, kv.block_size, kv.block_bytes, plan.context),
        *(round(kv.requests(plan.context), 2), plan.kv_gain, plan.ours.kv_at_most.tokens_logical),
        *(stock.budget_bytes, stock.tokens_logical, asdict(plan.rows)),
    )
    return dict(zip(keys, values, strict=True))


def _utilization(budget: Budget | None) -> dict[str, float | None]:
    if budget is None:
        return dict.fromkeys(("requested", "max_safe", "without_graphs", "to_keep_kv"))
    return {
        "requested": budget.utilization,
        "max_safe": budget.largest_utilization,
        "without_graphs": budget.without_graphs,
        "to_keep_kv": budget.to_keep_kv,
    }


def _memory(outcome: Outcome | None) -> dict[str, int] | None:
    return None if outcome is None else _budget(outcome.budget)


def _budget(budget: Budget) -> dict[str, int]:
    return {
        "total_bytes": budget.total_bytes,
        "requested_bytes": budget.requested_bytes,
        "non_kv_bytes": budget.non_kv_bytes,
        "graphs_bytes": budget.graphs_bytes,
        "kv_bytes": budget.kv_bytes,
        "outside_bytes": budget.outside_bytes,
        "free_bytes": budget.free_bytes,
    }
