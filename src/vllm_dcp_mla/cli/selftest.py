"""``selftest``: DCP with several processes on this machine, compared with float64 attention."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..compat.installed import package_folder
from ..compat.releases import installed_release
from ..planner.request import IMPOSSIBLE, UNREADABLE
from ..selftest.faults import FAULTS, PCP_FAULTS, SPANNING_FAULTS
from ..selftest.subjects import subject_of
from ..selftest.world import Sizes, model_heads
from ..settings import SettingsError, env_name, load_settings, user_workspace_bytes
from ..simulate.gpus import GPUS
from ..topology import check_topology
from . import options

if TYPE_CHECKING:
    from ..selftest.run import Case

#: Interleaves vLLM can be run with here: a divisor of the cache's block of 64 tokens.
INTERLEAVES = (1, 2, 4, 8, 16, 32, 64)
DEVICES = ("cpu", "cuda")
MAX_RANKS = 16  # processes of about 1 GB each
_SWITCHED_OFF = f"{env_name('disable')} is set: vLLM serves without what is tested here; unset it."


def selftest(
    ranks: Annotated[
        str, typer.Option("--ranks", metavar="N", help="Short for --tp N --dcp N; default: 2.")
    ] = "",
    tp: Annotated[
        str, typer.Option("--tp", metavar="N", help="Ranks; default: 2, 1 with --pcp.")
    ] = "",
    pcp: Annotated[
        str, typer.Option("--pcp", metavar="N", help="Ranks that share a prompt; default: 1.")
    ] = "",
    dcp: Annotated[
        str,
        typer.Option(
            "--dcp", metavar="N", help="Ranks that share a cache; default: --tp or --pcp."
        ),
    ] = "",
    interleave: Annotated[
        str,
        typer.Option(
            "--interleave", metavar="N", help="1 to 64; default: 1 and 64 (vLLM 0.29: 1)."
        ),
    ] = "",
    device: Annotated[
        str, typer.Option("--device", metavar="cpu|cuda", help="Where tensors and kernels are.")
    ] = "cpu",
    gpu: Annotated[
        str, typer.Option("--gpu", help=f"Whose backend runs: {', '.join(GPUS)}.")
    ] = "b200",
    fault: Annotated[
        str, typer.Option("--break", help=f"Plant a fault, to see it found: {', '.join(FAULTS)}.")
    ] = "",
    as_json: options.Json = False,
) -> None:
    """Run the plugin's own DCP path on this machine and compare it with dense attention."""
    numbers, unreadable = _read_numbers(ranks, tp, pcp, dcp, interleave)
    if device not in DEVICES:
        unreadable.append(f"--device is {device!r}; it must be one of {', '.join(DEVICES)}.")
    if gpu not in GPUS:
        unreadable.append(f"--gpu is {gpu!r}; it must be one of {', '.join(GPUS)}.")
    if fault and fault not in FAULTS:
        unreadable.append(f"--break is {fault!r}; it must be one of {', '.join(FAULTS)}.")
    try:
        if load_settings().disable:
            options.print_problems([_SWITCHED_OFF])
        user_workspace_bytes()
    except SettingsError as error:
        unreadable.append(str(error))
    if unreadable:
        _refuse(unreadable, UNREADABLE, as_json)
    sizes, interleaves = numbers
    if max(sizes.tp, sizes.pcp, sizes.num_ranks) > MAX_RANKS:
        asked = f"--tp is {sizes.tp}"
        if sizes.pcp > 1:
            asked = f"--tp {sizes.tp} and --pcp {sizes.pcp} are {sizes.num_ranks} ranks"
        problems = [f"{asked}; this machine's selftest runs at most {MAX_RANKS} ranks."]
    else:
        problems = check_topology(sizes.tp, sizes.pcp, sizes.dcp, model_heads())
    others = {"--tp": tp, "--pcp": pcp, "--dcp": dcp}
    if ranks and (given := [flag for flag, text in others.items() if text]):
        problems.append(f"--ranks and {given[0]} are given together; leave one of them out.")
    if sizes.dcp == 1 and not problems:
        problems = ["--dcp is 1: there is nothing to share; use 2 or more."]
    if fault in PCP_FAULTS and sizes.pcp == 1:
        problems.append(f"--break is {fault}, which shows with PCP only; add --pcp 2.")
    if fault in SPANNING_FAULTS and sizes.dcp <= sizes.pcp:
        problems.append(f"--break is {fault}; it needs --tp 2 --pcp 2 --dcp 4, or larger.")
    release = installed_release()
    if not release.interleaves and interleaves[0] > 1:
        problems.append(
            f"--interleave is {interleaves[0]}, but the indexer of vLLM {release.series} takes 1 "
            "only under DCP; leave it out, or use vLLM 0.30 or newer."
        )
    if (member := subject_of(gpu).member) in release.left_to_stock:
        problems.append(
            f"--gpu is {gpu}, but {member} is stock's with vLLM {release.series}; leave it out, or "
            "use vLLM 0.33."
        )
    if sizes.pcp > 1 and not release.gathers_here:
        problems.append(
            f"--pcp is {sizes.pcp}, but PCP with DCP is not served with vLLM {release.series}; "
            "leave it out, or use vLLM 0.33."
        )
    if package_folder("vllm") is None:
        problems.append("vLLM is not installed; run pip install 'vllm-dcp-mla[vllm]'.")
    if problems:
        _refuse(problems, IMPOSSIBLE, as_json)
    _run(sizes, interleaves, device, gpu, fault or None, as_json)


def unanswered(problems: list[str]) -> dict[str, Any]:
    """The JSON of a command line that could not be read."""
    return {"ok": False, "problems": problems, "cases": []}


def _refuse(problems: list[str], exit_code: int, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(unanswered(problems)))
    else:
        options.print_problems(problems)
    raise typer.Exit(exit_code)


def _read_numbers(
    ranks: str, tp: str, pcp: str, dcp: str, interleave: str
) -> tuple[tuple[Sizes, list[int]], list[str]]:
    problems = []

    def read(flag: str, text: str, default: int) -> int:
        if not text:
            return default
        try:
            return int(text)
        except ValueError:
            problems.append(f"{flag} is {text!r}; it must be a whole number such as {default}.")
            return default

    prompts = read("--pcp", pcp, 1)
    size = read("--tp", tp, read("--ranks", ranks, 2) if prompts == 1 else 1)
    shared = read("--dcp", dcp, size if prompts == 1 else prompts)
    one = read("--interleave", interleave, 1)
    if one not in INTERLEAVES:
        allowed = ", ".join(map(str, INTERLEAVES))
        problems.append(f"--interleave is {one}; it must be one of {allowed}.")
    both = [1, 64] if installed_release().interleaves else [1]
    return (Sizes(size, prompts, shared), [one] if interleave else both), problems


def _run(
    sizes: Sizes,
    interleaves: list[int],
    device: str,
    gpu: str,
    fault: str | None,
    as_json: bool,
) -> None:
    from ..selftest import run, world
    from ..simulate.driver import DriverStandInError

    out = options.console()
    # Progress is for people; JSON stands alone on standard output.
    status = Console(stderr=True).status("importing vLLM")
    try:
        with status:
            world.prepare(device)
            status.update(f"{sizes}: running")
            outcome = run.run_selftest(
                sizes,
                interleaves,
                device,
                gpu,
                fault,
                lambda case: status.update(f"{sizes}: {case.name} done"),
            )
    except (world.RankError, world.NoDeviceError, DriverStandInError) as error:
        _refuse([str(error)], IMPOSSIBLE, as_json)
    answer = run.as_json(outcome)
    if as_json:
        typer.echo(json.dumps(answer))
    else:
        out.print(_table(sizes, outcome))
        wrong = sum(not case.ok for case in outcome)
        planted = f" with the planted fault {fault}" if fault else ""
        out.print(f"{len(outcome) - wrong} of {len(outcome)} cases agree{planted}.")
    raise typer.Exit(0 if answer["ok"] else IMPOSSIBLE)


def _table(sizes: Sizes, outcome: list[Case]) -> Table:
    observed = any(case.syncs is not None for case in outcome)
    table = Table(f"{sizes} against dense float64 attention")
    headings = ["error", "limit", "collectives", *(["syncs", "compiles"] if observed else [])]
    for heading in [*headings, "seconds", ""]:
        table.add_column(heading, justify="right")
    for case in outcome:
        row = [
            case.name,
            f"{case.error:.4f}",
            f"{case.limit}",
            "/".join(map(str, dict.fromkeys(case.collectives))),
        ]
        if observed:
            row += [str(case.syncs), str(case.late_compiles)]
        table.add_row(*row, f"{case.seconds:.1f}", "agrees" if case.ok else "WRONG")
    return table
