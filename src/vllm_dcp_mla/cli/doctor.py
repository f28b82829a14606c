"""``doctor``: does the package work here, and which backend does vLLM pick?"""

from __future__ import annotations

import json
from typing import Annotated, Any, NoReturn

import typer
from rich.table import Table

from ..doctor.examine import examine
from ..doctor.report import Report
from ..doctor.server_log import LogError, read_log
from ..planner.request import (
    IMPOSSIBLE,
    UNREADABLE,
    RawRequest,
    Request,
    RequestError,
    read_request,
)
from . import options


def doctor(
    model: options.Model = "glm-5.2",
    gpu: options.GpuName = "b200",
    tp: options.Tp = "8",
    pcp: options.Pcp = "1",
    dcp: options.Dcp = "8",
    kv_cache_dtype: options.KvCacheDtype = "auto",
    max_num_batched_tokens: options.MaxNumBatchedTokens = "8192",
    comm: options.Comm = None,
    backend: Annotated[
        str | None, typer.Option("--attention-backend", help="Left out: vLLM selects.")
    ] = None,
    no_selection: Annotated[
        bool,
        typer.Option("--no-selection", help="Do not ask vLLM for its selection, which is slow."),
    ] = False,
    log: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Look for known failures in a server's log instead."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Check the installation, and ask stock vLLM which backend it picks for a configuration."""
    if log is not None:
        _finish(_read_log(log, as_json), as_json)
    raw = RawRequest(model, gpu, tp, pcp, dcp, kv_cache_dtype, max_num_batched_tokens, comm)
    request: Request | list[str]
    try:
        request = read_request(raw)
    except RequestError as error:
        if error.exit_code == UNREADABLE:
            _refuse(error.problems, as_json)
        request = error.problems
    _finish(examine(request, backend=backend, select=not no_selection), as_json)


def unanswered(problems: list[str]) -> dict[str, Any]:
    """The JSON of a command line that could not be read."""
    return {**Report([]).to_json(), "ok": False, "problems": problems}


def _read_log(path: str, as_json: bool) -> Report:
    try:
        return read_log(path)
    except LogError as error:
        _refuse([str(error)], as_json)


def _finish(report: Report, as_json: bool) -> NoReturn:
    if as_json:
        typer.echo(json.dumps(report.to_json()))
    else:
        _print(report)
    raise typer.Exit(0 if report.ok else IMPOSSIBLE)


def _refuse(problems: list[str], as_json: bool) -> NoReturn:
    if as_json:
        typer.echo(json.dumps(unanswered(problems)))
    else:
        options.print_problems(problems)
    raise typer.Exit(UNREADABLE)


def _print(report: Report) -> None:
    out = options.console()
    table = Table("NAME", "STATUS", "FOUND / FIX")
    for check in report.checks:
        fix = f"\nfix: {check.fix}" if check.fix else ""
        table.add_row(check.name, check.status.upper(), check.found + fix)
    out.print(table)
    selection = report.selection
    if selection.picked is not None:
        out.print(f"vLLM picks {selection.picked}: {selection.cls}", soft_wrap=True)
    if selection.refused:
        refused = Table("NOT PICKED", "REASONS")
        for name, reasons in selection.refused.items():
            refused.add_row(name, "\n".join(reasons))
        out.print(refused)
    counts = {s: sum(c.status == s for c in report.checks) for s in ("pass", "warn", "fail")}
    out.print(", ".join(f"{count} {status}" for status, count in counts.items()))
