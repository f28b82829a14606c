"""``rehearse``: stock vLLM on this machine's GPUs with random weights, DCP against TP1."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..models import ModelConfigError
from ..planner.request import IMPOSSIBLE, RawRequest, RequestError
from ..rehearse.config import INDEX_TOPK, SCORES
from ..rehearse.engine import GRAPHS
from ..rehearse.faults import FAULTS
from ..rehearse.machine import MachineError, examine
from ..rehearse.request import RawRehearsal, read_rehearsal
from ..settings import SettingsError, env_name, load_settings
from . import options

#: A request names a GPU; a rehearsal asks the machine which one it is.
_ANY_GPU = "b200"
_SWITCHED_OFF = (
    f"{env_name('disable')} is set: engines would serve as stock vLLM does, and nothing is there "
    "to rehearse; unset it."
)


def rehearse(
    model: options.Model = "glm-5.2",
    tp: options.Tp = "2",
    pcp: options.Pcp = "1",
    dcp: options.Dcp = "2",
    kv_cache_dtype: options.KvCacheDtype = "auto",
    comm: options.Comm = None,
    mtp: Annotated[
        str, typer.Option("--mtp", metavar="K", help="Draft tokens of the MTP layer.")
    ] = "0",
    graphs: Annotated[
        str, typer.Option("--graphs", help=f"CUDA graphs: {', '.join(GRAPHS)}.")
    ] = "none",
    max_num_batched_tokens: options.MaxNumBatchedTokens = "8192",
    index_topk: Annotated[
        str,
        typer.Option(
            "--index-topk",
            metavar="N",
            help=f"For shorter prompts: {', '.join(map(str, INDEX_TOPK))}; default: the model's.",
        ),
    ] = "",
    scores: Annotated[
        str, typer.Option("--scores", help=f"Scores over keys: {', '.join(SCORES)}.")
    ] = "normal",
    ranks_per_gpu: Annotated[
        str,
        typer.Option(
            "--ranks-per-gpu",
            metavar="N",
            help="auto: as few as work. With a GPU each, KV budgets, FlashInfer's autotuning and "
            "vLLM's direct exchange (symmetric memory, a2a) are rehearsed, too; drift is the same.",
        ),
    ] = "auto",
    time_limit: Annotated[
        str, typer.Option("--time-limit", metavar="SECONDS", help="For each engine.")
    ] = "600",
    long_prompt: Annotated[
        str,
        typer.Option("--long-prompt", metavar="TOKENS", help="Also serve prompts of so many."),
    ] = "0",
    cover: Annotated[
        bool,
        typer.Option(
            "--cover",
            help="Instead of what other flags name: models, caches, exchanges, graphs and MTP in "
            "all pairs, at TP2 and TP4 with DCP2.",
        ),
    ] = False,
    soak: Annotated[
        str,
        typer.Option(
            "--soak",
            metavar="MINUTES",
            help="Instead: arrivals, aborts and preemptions for so long.",
        ),
    ] = "0",
    fault: Annotated[
        str, typer.Option("--break", help=f"Plant a fault, to see it found: {', '.join(FAULTS)}.")
    ] = "",
    as_json: options.Json = False,
) -> None:
    """Serve a small random model on this machine's GPUs with DCP and compare it with one rank."""
    raw = RawRequest(model, _ANY_GPU, tp, pcp, dcp, kv_cache_dtype, max_num_batched_tokens, comm)
    more = RawRehearsal(
        mtp, graphs, index_topk, scores, ranks_per_gpu, time_limit, long_prompt, fault, soak, cover
    )
    # Progress is for people; JSON stands alone on standard output.
    status = Console(stderr=True).status("looking at this machine's GPUs")
    try:
        rehearsal = read_rehearsal(raw, more)
        settings = load_settings()
        if settings.disable:
            _refuse([_SWITCHED_OFF], IMPOSSIBLE, as_json)
        with status:
            machine = examine()
            # Both need what vLLM brings along; reading the command line does not.
            from ..rehearse import rehearsal as running
            from ..rehearse import report

            outcome = running.rehearse(
                rehearsal.configurations(machine, settings.kernel),
                machine,
                rehearsal.options,
                lambda text: status.update(Text(text)),  # a folder's name is no markup
            )
    except RequestError as error:
        _refuse(error.problems, error.exit_code, as_json)
    except (MachineError, ModelConfigError, SettingsError) as error:
        _refuse([str(error)], IMPOSSIBLE, as_json)
    if as_json:
        typer.echo(json.dumps(report.as_json(outcome, machine)))
    else:
        out = options.console()
        out.print(report.table(outcome, machine))
        for line in report.remarks(outcome):
            out.print(line)
    raise typer.Exit(0 if outcome.ok else IMPOSSIBLE)


def unanswered(problems: list[str]) -> dict[str, Any]:
    """The JSON of a command line that could not be read."""
    return {"ok": False, "problems": problems, "cases": []}


def _refuse(problems: list[str], exit_code: int, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(unanswered(problems)))
    else:
        options.print_problems(problems)
    raise typer.Exit(exit_code)
