"""Launches of a GPU, counted: from the operations that are called, or by the profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ALLOCATES = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class CountedOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that launch a kernel, and the bytes of what they read and write.

    Views and allocations launch nothing. Every tensor that an operation takes counts as read, every
    one that it returns as written.

    Attributes:
        launches: operations that launch.
        bytes: of their tensors.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches = 0
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operation, and counts it."""
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and name not in _ALLOCATES and name not in ("detach", "_unsafe_view"):
            self.note(*tree_leaves((args, kwargs)), *tree_leaves(result))
        return result

    def note(self, *tensors: Any) -> None:
        """Counts one launch that reads or writes these."""
        self.launches += 1
        self.bytes += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))


def profiled_launches(work: Callable[[], object]) -> int:
    """Kernels and copies that a call launches, as the profiler sees them; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    from torch.profiler import ProfilerActivity, profile

    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    return sum(1 for event in seen.events() if event.device_type.name == "CUDA")
