"""What follows a library's attention kernel: its LSE where it is wanted, rows without keys cleared.

One launch that touches the LSE and what has to be cleared. Masks of torch read and write the whole
output: with them 1,024 tokens of 512 keys took FlashMLA's kernel 311 us on an H200, without 215.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.warmup.jit_warmup import kernel_launcher
from vllm.model_executor.warmup.jit_warmup_triton_helper import (
    TritonWarmupTensor,
    VllmTritonJitKernel,
)
from vllm.triton_utils import tl, triton

from .base import MlaDims, SparseMlaBatch

_POINTERS = ("out_ptr", "lse_ptr", "found_ptr", "counts_ptr")
_INTEGERS = (
    *("out_token", "out_head", "lse_token", "lse_head", "found_token", "found_head", "heads"),
)
_BLOCK = 64


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_POINTERS
)
def _finish_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    lse_ptr,
    found_ptr,
    counts_ptr,
    out_token,
    out_head,
    lse_token,
    lse_head,
    found_token,
    found_head,
    heads,
    LATENT: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """One token."""
    token = tl.program_id(0).to(tl.int64)
    count = tl.load(counts_ptr + token)
    for first in range(0, heads, BLOCK):
        head = first + tl.arange(0, BLOCK)
        held = head < heads
        lse = tl.load(found_ptr + token * found_token + head * found_head, mask=held)
        lse = tl.where(count > 0, lse, float("-inf"))
        tl.store(lse_ptr + token * lse_token + head * lse_head, lse, mask=held)
    if count == 0:
        latent = tl.arange(0, LATENT)
        for row in range(0, heads):
            row_at = out_ptr + token * out_token + row * out_head
            tl.store(row_at + latent, tl.zeros((LATENT,), tl.bfloat16))


class _FinishKernel(VllmTritonJitKernel["_FinishKernel.CompileKey"]):
    """The kernel as vLLM warms it."""

    kernel = _finish_kernel
    bind_launch_inputs = False

    @dataclass(frozen=True)
    class CompileKey:
        """What a variant is compiled for."""

        latent_dim: int

    def get_warmup_keys(self, dims: MlaDims) -> list[CompileKey]:
        """All variants of a layer: one."""
        return [self.CompileKey(dims.kv_lora_rank)]

    def warmup_inputs(self, compile_key: CompileKey) -> dict[str, Any]:
        """Any inputs: nothing of them is part of the key."""
        dtypes = {"out_ptr": torch.bfloat16, "counts_ptr": torch.int32}
        return {
            **{p: TritonWarmupTensor(dtypes.get(p, torch.float32)) for p in _POINTERS},
            **dict.fromkeys(_INTEGERS, 2),
            "latent_dim": compile_key.latent_dim,
            "num_blocks": 1,
        }

    @kernel_launcher  # type: ignore[untyped-decorator]
    def __call__(self, *, latent_dim: int, num_blocks: int, **arguments: Any) -> Any:
        return (num_blocks,), {**arguments, "LATENT": latent_dim, "BLOCK": _BLOCK}


FINISH_KERNEL = _FinishKernel()


def warm_up(dims: MlaDims, warm: Callable[..., None]) -> None:
    """Has the kernel compiled.

    Args:
        dims: the model's MLA dims.
        warm: called with the kernel and the arguments of its warm-up.
    """
    warm(FINISH_KERNEL, dims)


def finish(batch: SparseMlaBatch, lse: torch.Tensor) -> None:
    """Writes ``batch.lse`` where it is wanted, and (0, -inf) for rows without keys, in place.

    Args:
        batch: launched; ``batch.out`` has rows without gaps.
        lse: ``[T, H]`` float32, what the library wrote; may be changed.
    """
    target = lse if batch.lse is None else batch.lse
    tokens, heads, latent = batch.out.shape
    FINISH_KERNEL(
        out_ptr=batch.out,
        lse_ptr=target,
        found_ptr=lse,
        counts_ptr=batch.counts,
        out_token=batch.out.stride(0),
        out_head=batch.out.stride(1),
        lse_token=target.stride(0),
        lse_head=target.stride(1),
        found_token=lse.stride(0),
        found_head=lse.stride(1),
        heads=heads,
        latent_dim=latent,
        num_blocks=tokens,
    )
