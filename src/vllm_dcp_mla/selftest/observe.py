"""What a rank notes while it runs: collectives, waits for the GPU, compilations.

Collectives go over gloo on either device, so that ranks may share one GPU; gloo moves host memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

#: Last in the list while a group's own collective runs: what it calls is not noted again.
_UNDER_WAY = "under way"
_SYNC_WARNING = "called a synchronizing CUDA operation"


@dataclass(slots=True)
class Builds:
    """What happened inside metadata builds; None where it cannot be seen, as on the CPU.

    Attributes:
        syncs: waits of the host for the GPU, as torch's sync debug mode counts them.
        late_compiles: Triton kernels compiled after their builder was made.
    """

    syncs: int | None = None
    late_compiles: int | None = None

    @contextmanager
    def watch(self, device: torch.device) -> Iterator[None]:
        """Adds what happens meanwhile in this process."""
        if device.type != "cuda":
            yield
            return
        import triton

        compiled: list[Any] = []
        runtime = triton.knobs.runtime
        hook, mode = runtime.jit_post_compile_hook, torch.cuda.get_sync_debug_mode()

        def note(*args: Any, **kwargs: Any) -> Any:
            compiled.append(kwargs)
            return None if hook is None else hook(*args, **kwargs)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            runtime.jit_post_compile_hook = note
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(mode)
                runtime.jit_post_compile_hook = hook
        waits = sum(_SYNC_WARNING in str(warning.message) for warning in caught)
        self.syncs = (self.syncs or 0) + waits
        self.late_compiles = (self.late_compiles or 0) + len(compiled)


def count_collectives() -> list[str]:
    """Wraps the collectives of this rank's process; returns the list that they are noted in.

    Those are the calls of vLLM's groups, and the two of torch that are called past them.
    """
    calls: list[str] = []
    from vllm.distributed.parallel_state import get_dcp_group, get_tp_group

    for group in {id(g): g for g in (get_dcp_group(), get_tp_group())}.values():
        for name in ("all_gather", "reduce_scatter", "all_reduce"):
            setattr(group, name, _counted(name, getattr(group, name), calls))
    distributed: Any = torch.distributed
    exchange = distributed.all_to_all_single
    gather = distributed.all_gather_into_tensor

    def counted_exchange(
        out: torch.Tensor, x: torch.Tensor, *, group: Any, async_op: bool
    ) -> _StagedExchange:
        assert async_op, "vLLM waits for the exchange itself"
        calls.append("all_to_all")
        received = torch.empty_like(out, device="cpu")
        work = exchange(received, x.cpu(), group=group, async_op=True)
        return _StagedExchange(work, received, out)

    def counted_gather(out: torch.Tensor, x: torch.Tensor, **options: Any) -> Any:
        if calls and calls[-1] == _UNDER_WAY:
            return gather(out, x, **options)
        calls.append(f"all_gather_into_tensor {tuple(out.shape)}")
        if out.device.type == "cpu":
            return gather(out, x, **options)
        received = torch.empty_like(out, device="cpu")
        gather(received, x.cpu(), **options)
        out.copy_(received)
        return None

    distributed.all_to_all_single = counted_exchange
    distributed.all_gather_into_tensor = counted_gather
    return calls


@dataclass(frozen=True, slots=True)
class _StagedExchange:
    work: Any
    received: torch.Tensor
    out: torch.Tensor

    def wait(self) -> None:
        self.work.wait()
        self.out.copy_(self.received)


def _counted(name: str, stock: Callable[..., torch.Tensor], calls: list[str]) -> Any:
    def counted(x: torch.Tensor, **options: int) -> torch.Tensor:
        calls.extend((name, _UNDER_WAY))
        sent = x.cpu()
        if x.dtype == torch.float8_e4m3fn:  # gloo knows no float8; its bytes travel as well
            received = stock(sent.view(torch.uint8), **options).view(x.dtype)
        else:
            received = stock(sent, **options)
        calls.pop()
        return received.to(x.device)

    return counted
