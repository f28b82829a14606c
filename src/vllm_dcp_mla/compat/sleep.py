"""Patch: the attention workspace is zero again after sleep mode woke a worker up.

Symptom: after ``/sleep?level=2`` and ``/wake_up``, garbage where trtllm-gen, or our Triton kernel's
count of arrivals, expects zeros.
Cause: the workspace belongs to the memory that sleep mode drops with the weights; vLLM restores
only what a model lists as a buffer.
Guard: wraps ``Worker.wake_up`` once; does nothing unless weights come back and a workspace exists.
Goes away when: vLLM offers attention implementations a hook after wake-up.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from .. import device_buffer

_MARK = "_dcp_mla_zeroes_workspace"


def install() -> None:
    """Wraps ``Worker.wake_up``; calling it again changes nothing.

    A process that has not imported vLLM's GPU worker runs none, and there is nothing to wake up.
    """
    module = sys.modules.get("vllm.v1.worker.gpu_worker")
    if module is None:
        return
    worker: Any = module.Worker
    stock = worker.wake_up
    if hasattr(stock, _MARK):
        return

    @functools.wraps(stock)
    def wake_up(self: Any, tags: list[str] | None = None) -> None:
        stock(self, tags)
        if tags is None or "weights" in tags:
            device_buffer.zero_all()

    setattr(wake_up, _MARK, True)
    worker.wake_up = wake_up
