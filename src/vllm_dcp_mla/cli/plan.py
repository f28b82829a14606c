"""``plan``: what a configuration costs on a rank, stock vLLM beside this package."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.table import Table

from ..compat.libraries import libraries_here
from ..planner.plan import Plan, make_plan, plan_json
from ..planner.request import (
    IMPOSSIBLE,
    UNREADABLE,
    RawRequest,
    Request,
    RequestError,
    find_gpu,
    read_request,
)
from ..settings import Settings, SettingsError, load_settings, user_workspace_bytes
from . import options

_GIB = 1 << 30


def plan(
    model: options.Model = "glm-5.2",
    gpu: options.GpuName = "b200",
    tp: options.Tp = "8",
    pcp: options.Pcp = "1",
    dcp: options.Dcp = "8",
    kv_cache_dtype: options.KvCacheDtype = "auto",
    max_num_batched_tokens: options.MaxNumBatchedTokens = "8192",
    comm: options.Comm = None,
    as_json: options.Json = False,
) -> None:
    """Check a topology and size its attention workspace; needs neither torch, vLLM nor a GPU."""
    raw = RawRequest(model, gpu, tp, pcp, dcp, kv_cache_dtype, max_num_batched_tokens, comm)
    request: Request | None = None
    try:
        request = read_request(raw)
        settings, user_workspace = _read_environment()
        found_gpu = find_gpu(request.gpu)
        answer = make_plan(request, found_gpu, libraries_here(), settings, user_workspace)
        exit_code = IMPOSSIBLE if answer.problems else 0
    except RequestError as error:
        kv = request.kv_cache_dtype if request else ""
        answer, exit_code = Plan(kv, problems=error.problems), error.exit_code
    if as_json:
        typer.echo(json.dumps(plan_json(request, answer)))
    else:
        options.print_problems(answer.problems)
        if request is not None and not answer.problems:
            _print(request, answer)
    raise typer.Exit(exit_code)


def unanswered(problems: list[str]) -> dict[str, Any]:
    """The JSON of a command line that could not be read."""
    return plan_json(None, Plan("", problems=problems))


def _read_environment() -> tuple[Settings, int | None]:
    try:
        return load_settings(), user_workspace_bytes()
    except SettingsError as error:
        raise RequestError([str(error)], UNREADABLE) from None


def _print(request: Request, answer: Plan) -> None:
    out = options.console()
    served = answer.served_by or "stock vLLM, as without DCP"
    out.print(
        f"{request.model} on {request.gpu}: tp {request.tp}, pcp {request.pcp}, dcp {request.dcp}, "
        f"{answer.kv_cache_dtype} cache, served by {served}."
    )
    if answer.workspace.total_bytes:
        out.print(_table(request, answer))
    for note in answer.notes:
        out.print(note)
    out.print("Flags:", " ".join(answer.flags), soft_wrap=True)


def _table(request: Request, answer: Plan) -> Table:
    w, tokens = answer.workspace, request.max_num_batched_tokens
    table = Table("attention workspace of a rank")
    table.add_column("vllm-dcp-mla", justify="right")
    table.add_column("stock vLLM", justify="right")
    table.add_row("query heads the kernel is sized for", f"{w.heads:,}", f"{w.stock_heads:,}")
    table.add_row("tokens a launch", f"{w.tokens_per_launch:,}", f"{tokens:,}")
    table.add_row(f"launches for {tokens:,} tokens", f"{w.launches:,}", "1")
    for line in answer.lines:
        table.add_row(line.name, _bytes(line.bytes), _bytes(line.stock_bytes))
    table.add_section()
    together = "slab and scratch together" if w.slab_bytes else "together"
    table.add_row(together, _bytes(w.total_bytes), _bytes(w.stock_total_bytes))
    profiled = any(line.profiled for line in answer.lines)
    table.add_row("counted by memory profiling", "yes" if profiled else "no", "no")
    return table


def _bytes(count: int) -> str:
    return f"{count:,} B = {count / _GIB:.3f} GiB"
