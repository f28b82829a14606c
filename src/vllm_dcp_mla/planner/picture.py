"""Pictures on disk: matplotlib where it loads, and files that are whole or as they were."""

from __future__ import annotations

import errno
import io
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from .request import IMPOSSIBLE, UNREADABLE, RequestError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")


def check_name(file: str) -> None:
    """Refuses a name whose ending is no format's.

    Raises:
        RequestError: names the endings.
    """
    if Path(file).suffix.lower() not in SUFFIXES:
        raise RequestError(
            [f"--plot is {file!r}; give a file that ends with {', '.join(SUFFIXES)}."], UNREADABLE
        )


def check_library() -> None:
    """Refuses where matplotlib is missing or does not load.

    Raises:
        RequestError: says which, and what to do.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        problem = "--plot needs matplotlib, which is not installed; pip install matplotlib."
        raise RequestError([problem], IMPOSSIBLE) from None
    except (OSError, ValueError) as error:  # its settings are read while it is imported
        problem = (
            f"--plot needs matplotlib, which does not load: {error}; correct MPLBACKEND, "
            "MPLCONFIGDIR or its matplotlibrc."
        )
        raise RequestError([problem], IMPOSSIBLE) from None


def save(figure: Figure, file: str, dpi: int) -> None:
    """Writes a figure; where that fails, the file is as it was.

    Raises:
        RequestError: the file cannot be written.
    """
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=dpi, format=Path(file).suffix[1:].lower())
    try:
        _replace(Path(file).resolve(), drawn.getvalue())
    except OSError as error:
        problem = f"--plot cannot write {file}: {error.strerror or error}; name another file."
        raise RequestError([problem], IMPOSSIBLE) from None


def _replace(path: Path, content: bytes) -> None:
    there = path.exists()
    if there and not path.is_file():  # a device or a pipe; of a folder it is an error
        path.write_bytes(content)
        return
    if there and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    beside = path.with_name(f".{path.name[-100:]}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        if there:
            shutil.copymode(path, beside)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
