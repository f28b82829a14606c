"""``plan``: what a configuration costs on a rank, stock vLLM beside this package."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from ..compat.libraries import libraries_here
from ..planner.compare import differences, read_plan
from ..planner.figures import FiguresPlan, RawFigures, plan_figures, read_figures
from ..planner.plan import Plan, make_plan
from ..planner.plot import draw
from ..planner.report import figures_json, plan_json
from ..planner.request import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_UTILIZATION,
    IMPOSSIBLE,
    UNREADABLE,
    RawRequest,
    Request,
    RequestError,
    find_gpu,
    read_request,
)
from ..planner.sweep import read_sweep, run_sweep
from ..settings import Settings, SettingsError, load_settings, user_workspace_bytes
from . import options, plan_tables

_Text = str | None
Utilization = Annotated[
    str,
    typer.Option(
        "--utilization",
        "--gpu-memory-utilization",
        metavar="SHARE",
        help="Share of the GPU that vLLM plans with.",
    ),
]

#: Flags that --sweep takes, and the fields of the request or the figures that they are.
_SWEPT_REQUEST = {
    name.replace("_", "-"): name
    for name in (
        *("model", "gpu", "tp", "pcp", "dcp", "kv_cache_dtype", "max_num_batched_tokens", "comm"),
        *("max_model_len", "max_num_seqs", "block_size", "utilization", "mtp"),
        *("total_gib", "graphs_gib", "autotune_gib"),
    )
}
_SWEPT_FIGURES = {
    name.replace("_", "-"): name
    for name in ("utilization", "non_kv_gib", "graphs_gib", "autotune_gib", "total_gib")
}


@dataclass(frozen=True, slots=True)
class _Answer:
    """A plan of either kind, and how the command ends."""

    json: dict[str, Any]
    exit_code: int
    problems: list[str]
    request: Request | None = None
    plan: Plan | None = None
    figures: FiguresPlan | None = None


def plan(
    command: typer.Context,
    model: options.Model = "glm-5.2-fp8",
    gpu: options.GpuName = "b200",
    tp: options.Tp = "8",
    pcp: options.Pcp = "1",
    dcp: options.Dcp = "8",
    kv_cache_dtype: options.KvCacheDtype = "auto",
    max_num_batched_tokens: options.MaxNumBatchedTokens = "8192",
    comm: options.Comm = None,
    max_model_len: Annotated[
        _Text, typer.Option(metavar="N", help="Most tokens of a request; left out: the model's.")
    ] = None,
    max_num_seqs: Annotated[
        _Text, typer.Option(metavar="N", help="Most requests of a step; left out: vLLM's 1024.")
    ] = None,
    block_size: Annotated[
        str, typer.Option(metavar="N", help="Tokens of a cache block on a rank.")
    ] = DEFAULT_BLOCK_SIZE,
    utilization: Utilization = DEFAULT_UTILIZATION,
    mtp: Annotated[
        str, typer.Option(metavar="N", help="Draft tokens of the MTP layer; 0: no drafter.")
    ] = "0",
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="Without CUDA graphs.")
    ] = False,
    context: Annotated[
        _Text, typer.Option(metavar="N", help="Say how many requests of N tokens fit at once.")
    ] = None,
    total_gib: Annotated[
        _Text, typer.Option(metavar="GIB", help="Memory of the GPU, instead of the known one.")
    ] = None,
    graphs_gib: Annotated[
        _Text, typer.Option(metavar="GIB", help="CUDA graphs, instead of an estimate.")
    ] = None,
    autotune_gib: Annotated[
        _Text, typer.Option(metavar="GIB", help="Autotuning, instead of an estimate.")
    ] = None,
    non_kv_gib: Annotated[
        _Text, typer.Option(metavar="GIB", help="Of a log: what was profiled, without graphs.")
    ] = None,
    kv_gib: Annotated[
        _Text, typer.Option(metavar="GIB", help="Of a log: 'Available KV cache memory'.")
    ] = None,
    free_gib: Annotated[
        _Text, typer.Option(metavar="GIB", help="Of a log: free once the KV cache was made.")
    ] = None,
    logged_utilization: Annotated[
        str, typer.Option(metavar="SHARE", help="The share that --kv-gib, --free-gib come from.")
    ] = DEFAULT_UTILIZATION,
    sweep: Annotated[
        _Text, typer.Option(metavar="FLAG=A,B,C", help="One plan a value, side by side.")
    ] = None,
    plot: Annotated[
        _Text, typer.Option(metavar="FILE", help="Draw the plans as stacked bars.")
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A B", help="What differs between two files of plan --json."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Say where the memory of a rank goes, and whether it fits; needs no torch, vLLM or GPU.

    With --non-kv-gib, --kv-gib or --free-gib the figures of a server log are planned with instead
    of a model; --total-gib is needed then.
    """
    raw = RawRequest(
        model, gpu, tp, pcp, dcp, kv_cache_dtype, max_num_batched_tokens, comm, max_model_len,
        max_num_seqs, block_size, utilization, mtp, context, enforce_eager, total_gib, graphs_gib,
        autotune_gib,
    )  # fmt: skip
    figures = RawFigures(
        total_gib, non_kv_gib, graphs_gib, autotune_gib, kv_gib, free_gib, utilization,
        logged_utilization,
    )  # fmt: skip
    try:
        if compare is not None:
            _refuse_more_than_files(command)
            exit_code = _compare(compare, as_json)
        elif sweep is not None:
            exit_code = _sweep(raw, figures, sweep, plot, as_json)
        else:
            exit_code = _one(raw, figures, plot, as_json)
    except RequestError as error:
        exit_code = error.exit_code
        if as_json:
            typer.echo(json.dumps(unanswered(error.problems)))
        else:
            options.print_problems(error.problems)
    raise typer.Exit(exit_code)


def unanswered(problems: list[str]) -> dict[str, Any]:
    """The JSON of a command line that could not be read."""
    return plan_json(None, Plan("", problems=problems))


def _one(raw: RawRequest, figures: RawFigures, plot: str | None, as_json: bool) -> int:
    answer = _answer(raw, figures)
    undrawn: list[str] = []
    if plot is not None and answer.exit_code != UNREADABLE:
        label = f"tp {raw.tp}, pcp {raw.pcp}, dcp {raw.dcp}"
        title = "figures of a log" if figures.replace_a_model else f"{raw.model} on {raw.gpu}"
        undrawn = _draw([(label, answer.json)], title, "", plot)
    exit_code = answer.exit_code or (IMPOSSIBLE if undrawn else 0)
    if as_json:
        said = {**answer.json, "problems": [*answer.json["problems"], *undrawn]}
        typer.echo(json.dumps({**said, "ok": answer.json["ok"] and not undrawn}))
        return exit_code
    options.print_problems([*answer.problems, *undrawn])
    if answer.request is not None and answer.plan is not None and answer.plan.ours is not None:
        plan_tables.print_plan(answer.request, answer.plan)
    elif answer.figures is not None:
        plan_tables.print_figures(answer.figures)
    return exit_code


def _draw(plans: list[tuple[str, dict[str, Any]]], title: str, axis: str, file: str) -> list[str]:
    """Draws plans; why they could not be drawn, which is no reason not to print them.

    Raises:
        RequestError: a file name that cannot be one.
    """
    try:
        draw(plans, title, axis, file)
    except RequestError as error:
        if error.exit_code == UNREADABLE:
            raise
        return error.problems
    return []


def _answer(raw: RawRequest, figures: RawFigures) -> _Answer:
    return _from_figures(figures) if figures.replace_a_model else _from_model(raw)


def _from_model(raw: RawRequest) -> _Answer:
    request: Request | None = None
    try:
        request = read_request(raw)
        settings, user_workspace = _read_environment()
        gpu = find_gpu(request.gpu)
        plan = make_plan(request, gpu, libraries_here(), settings, user_workspace)
        exit_code = IMPOSSIBLE if plan.problems else 0
    except RequestError as error:
        kv = request.kv_cache_dtype if request else ""
        plan, exit_code = Plan(kv, problems=error.problems), error.exit_code
    return _Answer(plan_json(request, plan), exit_code, plan.problems, request, plan)


def _from_figures(raw: RawFigures) -> _Answer:
    try:
        plan = plan_figures(read_figures(raw))
    except RequestError as error:
        return _Answer(figures_json(None, error.problems), error.exit_code, error.problems)
    exit_code = IMPOSSIBLE if plan.problems else 0
    return _Answer(figures_json(plan, []), exit_code, plan.problems, figures=plan)


def _sweep(raw: RawRequest, figures: RawFigures, text: str, plot: str | None, as_json: bool) -> int:
    names = _SWEPT_FIGURES if figures.replace_a_model else _SWEPT_REQUEST
    sweep = read_sweep(text, tuple(names))

    def one(flag: str, value: str) -> dict[str, Any]:
        change: dict[str, Any] = {names[flag]: value}
        if figures.replace_a_model:
            answer = _answer(raw, replace(figures, **change))
        else:
            answer = _answer(replace(raw, **change), figures)
        if answer.exit_code == UNREADABLE:
            raise RequestError(answer.problems, UNREADABLE)
        return answer.json

    rows = run_sweep(sweep, one)
    undrawn: list[str] = []
    if plot is not None:
        title = "figures of a log" if figures.replace_a_model else _title(raw, names[sweep.flag])
        undrawn = _draw([(row["value"], row) for row in rows], title, f"--{sweep.flag}", plot)
    if as_json:
        typer.echo(json.dumps({"sweep": sweep.flag, "plans": rows, "problems": undrawn}))
    else:
        plan_tables.print_sweep(sweep.flag, rows)
        options.print_problems(undrawn)
    # As long as one value works, the sweep has found it.
    return 0 if any(row["ok"] for row in rows) and not undrawn else IMPOSSIBLE


def _title(raw: RawRequest, swept: str) -> str:
    named = {"tp": raw.tp, "pcp": raw.pcp, "dcp": raw.dcp}
    sizes = ", ".join(f"{name} {size}" for name, size in named.items() if name != swept)
    parts = [raw.model] * (swept != "model") + [f"on {raw.gpu}"] * (swept != "gpu")
    return f"{' '.join(parts)}: {sizes}".strip(": ")


def _refuse_more_than_files(command: typer.Context) -> None:
    given = [
        parameter.opts[0]
        for parameter in command.command.params
        if parameter.name not in ("compare", "as_json")
        and (source := command.get_parameter_source(parameter.name or "")) is not None
        and source.name == "COMMANDLINE"
    ]
    if given:
        problem = f"--compare reads two files and plans nothing; leave {', '.join(given)} out."
        raise RequestError([problem], UNREADABLE)


def _compare(files: tuple[str, str], as_json: bool) -> int:
    found = differences(*(read_plan(file) for file in files))
    if as_json:
        rows = [
            {"name": d.name, "before": d.before, "after": d.after, "change": d.change}
            for d in found
        ]
        typer.echo(json.dumps({"differences": rows}))
    else:
        plan_tables.print_differences(files, found)
    return 0


def _read_environment() -> tuple[Settings, int | None]:
    try:
        return load_settings(), user_workspace_bytes()
    except SettingsError as error:
        raise RequestError([str(error)], UNREADABLE) from None
