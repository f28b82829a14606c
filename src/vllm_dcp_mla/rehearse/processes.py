"""Processes that leave nothing behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess

import psutil

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Has the kernel kill this process once its parent ends, however that ends.

    Raises:
        SystemExit: the parent has ended already.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        raise SystemExit("the parent ended before this process started")


def end_family(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and all that it started, and reaps it."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    if process.poll() is None:
        kill(process.pid)
    for child in family:
        kill(child.pid)
    process.wait()


def kill(pid: int) -> None:
    """SIGKILL; a process that has ended meanwhile is fine."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
