"""Whether processes that a rehearsal started are gone."""

import time

import psutil


def assert_ended(pids, seconds=10):
    """Gone, or dead and not yet reaped by whoever adopted it."""
    until = time.monotonic() + seconds
    left = list(pids)
    while left and time.monotonic() < until:
        left = [pid for pid in left if runs(pid)]
        time.sleep(0.02)
    assert left == []


def runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
