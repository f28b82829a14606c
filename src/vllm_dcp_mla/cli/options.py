"""Flags that commands share, and how they write.

Numbers are taken as text: all that is wrong with a command line is said at once, in JSON where JSON
was asked for.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.console import Console

from ..models import BUILT_IN
from ..planner.request import COMMS, KV_CACHE_DTYPES, LOCAL
from ..simulate.gpus import GPUS

#: Columns where the width of the terminal is not known, as in a pipe.
_WIDTH = 100
#: A narrower terminal breaks the lines itself: tables made for it would lose their figures.
_LEAST_WIDTH = 80

Model = Annotated[
    str, typer.Option("--model", help=f"{', '.join(BUILT_IN)} or a folder with a config.json.")
]
GpuName = Annotated[str, typer.Option("--gpu", help=f"{', '.join(GPUS)} or {LOCAL}.")]
Tp = Annotated[str, typer.Option("--tp", "--tensor-parallel-size", metavar="N")]
Pcp = Annotated[str, typer.Option("--pcp", "--prefill-context-parallel-size", metavar="N")]
Dcp = Annotated[str, typer.Option("--dcp", "--decode-context-parallel-size", metavar="N")]
KvCacheDtype = Annotated[str, typer.Option("--kv-cache-dtype", help=", ".join(KV_CACHE_DTYPES))]
MaxNumBatchedTokens = Annotated[
    str, typer.Option("--max-num-batched-tokens", metavar="N", help="Most tokens of a step.")
]
Comm = Annotated[
    str | None,
    typer.Option("--comm", "--dcp-comm-backend", help=f"{', '.join(COMMS)}; left out: by model."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def console() -> Console:
    """Standard output; what is printed is text, never markup."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    made = Console(width=None if known else _WIDTH, markup=False, highlight=False, emoji=False)
    made.width = max(made.width, _LEAST_WIDTH)
    return made


def print_problems(problems: list[str]) -> None:
    """One sentence a line, to standard error."""
    for problem in problems:
        typer.echo(problem, err=True)
