"""Entry point of ``vllm-dcp-mla``.

Exit status: 0 good; 1 understood, and a problem or an impossible configuration found; 2 cannot be
parsed, or an unknown name.
"""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, NoReturn

import typer

from .. import __version__
from ..planner.request import IMPOSSIBLE, UNREADABLE
from . import bench, doctor, options, plan, rehearse, selftest

_INTERRUPTED = 130  # as a shell reports SIGINT
#: Of a write: commands say themselves which of their files they could not write.
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

app = typer.Typer(
    name="vllm-dcp-mla",
    help="Sparse MLA with decode context parallelism, next to stock vLLM.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
# Beside the commands' names; longer ones would be cut.
app.command(short_help="Check installation, settings and selection.")(doctor.doctor)
app.command(short_help="Say where memory goes, and what fits.")(plan.plan)
app.command(short_help="Compare DCP here with dense attention.")(selftest.selftest)
app.command(short_help="Compare DCP on GPUs with one rank.")(rehearse.rehearse)
app.command(short_help="Time kernels and steps beside stock's.")(bench.bench)

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
    if sys.stdout is None:
        return _fail("standard output is closed; leave it open, or redirect it to a file.")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A folder's name may hold what the terminal's encoding does not.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with _unwinding_signals():
            status = app(arguments or ["--help"], prog_name="vllm-dcp-mla", standalone_mode=False)
            sys.stdout.flush()
    except _CommandLineError as error:
        return _refuse(error, arguments)
    except (typer.Abort, KeyboardInterrupt):
        return _INTERRUPTED
    except OSError as error:
        return _fail(_said_of(error))
    return status if isinstance(status, int) else 0


@contextmanager
def _unwinding_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end a command as an interrupt does: no process and no folder is left."""

    def unwind(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    ours = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) == signal.SIG_DFL  # nohup ignores SIGHUP: so it stays
    ]
    for number in ours:
        signal.signal(number, unwind)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _said_of(error: OSError) -> str:
    """What to say of an error that no command expects: standard output's, or this machine's."""
    if error.filename is None and error.errno in _WRITE_ERRORS:
        # What is left in it would be tried once more, and fail, when Python ends.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return f"standard output cannot be written: {error.strerror}; redirect it elsewhere."
    return f"this machine refused: {error}; put that right, and start again."


def _fail(problem: str) -> int:
    options.print_problems([problem])
    return IMPOSSIBLE


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
