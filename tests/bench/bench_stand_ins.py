"""A clock that ticks as it is told, and a workbench on the CPU that times with it."""

import torch

from vllm_dcp_mla.bench.floor import Ceilings


class Clock:
    """Says scripted microseconds for each pass; notes whose turn it was.

    Work runs once, to warm up: interpreted kernels are slow.
    """

    def __init__(self, times=None):
        self.times = times or {}
        self.turns = []

    def prepare(self, work):
        work()
        name = getattr(work, "name", None)
        times = iter(self.times.get(name, ()))

        def once():
            self.turns.append(name)
            return next(times, 100.0)

        return once


def workbench(clock=None, quick=True):
    from vllm_dcp_mla.bench.workbench import Workbench

    ceilings = Ceilings(bytes_per_us=4e6, flops_per_us=8e8)
    return Workbench(
        torch.device("cpu"), quick, ceilings, num_sms=4, l2_bytes=1 << 16,
        stopwatch=clock or Clock(),
    )  # fmt: skip
