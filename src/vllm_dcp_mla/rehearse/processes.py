"""Processes that leave nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess

import psutil

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process once its parent ends, however that ends.

    Args:
        parent: its process id. Not told by being 1: in a container, that may be the parent itself.

    Raises:
        SystemExit: the parent has ended already.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the parent ended before this process started")


def end_family(process: subprocess.Popen[bytes]) -> None:
    """Kills a process that leads a session of its own and all that it started, and reaps it."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    if process.poll() is None:
        kill(process.pid)
    for child in family:
        kill(child.pid)
    # Those whose parent has ended already: they are nobody's children, but of its group.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def kill(pid: int) -> None:
    """SIGKILL; a process that has ended meanwhile is fine."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
