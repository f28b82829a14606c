"""``bench``: this package's work beside what stock vLLM offers and beside the machine's floor."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..bench import plot as plotting
from ..bench.works import WORKS, Work
from ..planner.request import IMPOSSIBLE, UNREADABLE, RequestError
from . import options

_DEFAULT = ",".join(name for name, work in WORKS.items() if work.default)


def bench(
    work: Annotated[
        str,
        typer.Option(
            "--work",
            metavar="NAME,..",
            help=f"{', '.join(WORKS)}; default: {_DEFAULT.replace(',', ', ')}.",
            show_default=False,
        ),
    ] = _DEFAULT,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes, in two minutes.")] = False,
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="FILE", help="Draw all of it on one page.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Time attention, its step, splits, metadata and start-up on this machine, beside stock's."""
    try:
        works = read_works(work)
        if plot is not None:
            plotting.check_target(plot)
        _run(works, quick, plot, as_json)
    except RequestError as error:
        if as_json:
            typer.echo(json.dumps(unanswered(error.problems)))
        else:
            options.print_problems(error.problems)
        raise typer.Exit(error.exit_code) from None


def read_works(text: str) -> list[Work]:
    """The works of ``--work``, in the order of the list.

    Raises:
        RequestError: a name that is not known, or none.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in WORKS]
    if unknown or not names:
        found = ", ".join(map(repr, unknown)) or repr(text)
        raise RequestError(
            [f"--work has {found}; known are {', '.join(WORKS)}, separated by commas."], UNREADABLE
        )
    return [work for name, work in WORKS.items() if name in names]


def unanswered(problems: list[str]) -> dict[str, Any]:
    """The JSON of a command line that could not be answered."""
    return {"ok": False, "problems": problems, "machine": {}, "rows": []}


def _run(works: list[Work], quick: bool, plot: str | None, as_json: bool) -> None:
    # Progress is for people; JSON stands alone on standard output.
    console = Console(stderr=True)
    status = console.status("looking at this machine")

    def note(text: str) -> None:
        if console.is_terminal:
            status.update(Text(text.splitlines()[-1]))
        else:
            # What was measured is not lost with a command that is stopped.
            print(text, file=sys.stderr, flush=True)

    from ..bench import run
    from ..simulate.driver import DriverStandInError

    try:
        # What libraries print is progress as well.
        with status, contextlib.redirect_stdout(sys.stderr):
            outcome = run.run_bench(works, quick=quick, note=note)
    except run.BenchError as error:
        raise RequestError(error.problems, IMPOSSIBLE) from None
    except DriverStandInError as error:
        raise RequestError([str(error)], IMPOSSIBLE) from None
    from ..bench import report

    if plot is not None:
        try:
            said = plotting.draw(outcome, plot)
        except RequestError as error:  # what was measured is not lost with the picture
            outcome.problems += error.problems
        else:
            outcome.remarks += [said] if said is not None else []
    if as_json:
        typer.echo(json.dumps(report.as_json(outcome)))
    else:
        out = options.console()
        out.print(report.machine_line(outcome.machine))
        for table in report.tables(outcome):
            out.print(table)
        for line in (*outcome.problems, *outcome.remarks, *outcome.not_measured):
            out.print(line)
        out.print(f"{len(outcome.rows)} rows in {outcome.seconds:.0f} s.")
    raise typer.Exit(0 if outcome.ok else IMPOSSIBLE)
