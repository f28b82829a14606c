"""Entry point of ``vllm-dcp-mla``.

Exit status: 0 good; 1 understood, and a problem or an impossible configuration found; 2 cannot be
parsed, or an unknown name.
"""

from __future__ import annotations

import io
import json
import sys
from typing import Annotated

import typer

from .. import __version__
from ..planner.request import UNREADABLE
from . import bench, doctor, options, plan, rehearse, selftest

_INTERRUPTED = 130  # as a shell reports SIGINT

app = typer.Typer(
    name="vllm-dcp-mla",
    help="Sparse MLA with decode context parallelism, next to stock vLLM.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(doctor.doctor)
app.command()(plan.plan)
app.command()(selftest.selftest)
app.command()(rehearse.rehearse)
app.command()(bench.bench)

_UNANSWERED = {
    "doctor": doctor.unanswered,
    "plan": plan.unanswered,
    "selftest": selftest.unanswered,
    "rehearse": rehearse.unanswered,
    "bench": bench.unanswered,
}
# ClickException: click's, or that of Typer's own copy of click in newer releases.
_CommandLineError: type[BaseException] = typer.BadParameter.__mro__[2]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vllm-dcp-mla {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; its exit status.

    Args:
        arguments: what follows the program's name; ``sys.argv`` by default.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A folder's name may hold what the terminal's encoding does not.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = app(arguments or ["--help"], prog_name="vllm-dcp-mla", standalone_mode=False)
    except _CommandLineError as error:
        return _refuse(error, arguments)
    except (typer.Abort, KeyboardInterrupt):
        return _INTERRUPTED
    return status if isinstance(status, int) else 0


def _refuse(error: BaseException, arguments: list[str]) -> int:
    command = next((a for a in arguments if a in _UNANSWERED), None)
    usage = " ".join(filter(None, ("vllm-dcp-mla", command, "--help")))
    said = getattr(error, "message", "") or str(error)
    problem = f"{said.rstrip('.')}; see {usage} for what is allowed."
    if command is not None and "--json" in arguments:
        typer.echo(json.dumps(_UNANSWERED[command]([problem])))
    else:
        options.print_problems([problem])
    return UNREADABLE


if __name__ == "__main__":
    sys.exit(main())
