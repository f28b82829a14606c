"""NVIDIA's multi-process service for the ranks of one engine, where the machine has it.

Without it the processes on a GPU take turns, and a collective waits for a turn of every rank: on
one H200, an all-reduce of 128 KiB took 5 ms with 2 ranks, 27 ms with 4 and 158 ms with 8. Each
engine gets a service of its own, so that a rank that is killed takes no other engine with it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .placement import visible
from .processes import die_with_parent, end_family

_CONTROL = "nvidia-cuda-mps-control"
_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_LOGS = "CUDA_MPS_LOG_DIRECTORY"
_DEFAULT_PIPES = Path("/tmp/nvidia-mps")
_START_SECONDS = 10
#: Longest path of a Unix socket in bytes; the service's names take up to 20 after its folder.
_MAX_FOLDER_BYTES = 107 - 20


def available() -> bool:
    """Whether ranks that share a GPU can run at the same time here."""
    return shutil.which(_CONTROL) is not None or _is_running()


def _is_running() -> bool:
    return _PIPES in os.environ or (_DEFAULT_PIPES / "control").exists()


def unused(folder: Path) -> dict[str, str]:
    """The variable by which ranks find no service, whichever the machine runs: they take turns."""
    return {_PIPES: str(folder / "no-service")}


class MultiProcessService:
    """A service in a folder of its own; :meth:`stop` it once its clients have ended."""

    def __init__(self, folder: Path) -> None:
        self._logs = folder
        self._pipes = folder
        self._daemon: subprocess.Popen[bytes] | None = None

    def start(self, gpus: tuple[int, ...]) -> dict[str, str]:
        """Starts the service for some GPUs; the variables by which ranks find it and them.

        Where the machine has none, where it does not start, and where one runs already, only the
        GPUs are named: CUDA then finds that one, or lets the ranks take turns.
        """
        shown = visible(gpus)
        control = shutil.which(_CONTROL)
        if control is None or _is_running():
            return shown
        self._logs.mkdir(mode=0o700)
        if len(os.fsencode(self._pipes)) > _MAX_FOLDER_BYTES:
            self._pipes = Path(tempfile.mkdtemp(prefix="dcp-mla-mps-", dir="/tmp"))
        variables = {_PIPES: str(self._pipes), _LOGS: str(self._logs)}
        self._daemon = subprocess.Popen(
            [sys.executable, "-m", __name__, str(os.getpid()), control],
            env={**os.environ, **shown, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self._daemon.poll() is None:
            if (self._pipes / "control").exists():
                # The service numbers the GPUs that it was shown anew.
                return variables | visible(tuple(range(len(gpus))), environ={})
            time.sleep(0.05)
        self.stop()
        return shown

    def stop(self) -> None:
        """Ends the service and the servers that it started."""
        if self._daemon is not None:
            end_family(self._daemon)
        if self._pipes != self._logs:
            shutil.rmtree(self._pipes, ignore_errors=True)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], [sys.argv[2], "-f"])
