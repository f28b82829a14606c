"""Widens blocks of an fp8 cache to bf16, for kernels that read bf16 only, in Triton.

Two launches: one copies blocks of requests next to each other, as numbers of the value that they
stand for, and notes where each block went; the other turns cache rows into rows of the copy.
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

from .base import MlaDims

_WIDEN_POINTERS = (
    *("blocks_ptr", "table_ptr", "owners_ptr", "firsts_ptr", "wide_ptr", "moved_ptr"),
)
_WIDEN_INTEGERS = ("block_stride", "block_size", "table_stride", "parts")
_REMAP_POINTERS = ("topk_ptr", "counts_ptr", "moved_ptr")
_REMAP_INTEGERS = ("topk_token", "block_rows", "block_size")
_BLOCK_ROWS = 16
_BLOCK_KEYS = 1024


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=_WIDEN_INTEGERS, do_not_specialize_on_alignment=_WIDEN_POINTERS
)
def _widen_kernel(  # type: ignore[no-untyped-def]
    blocks_ptr,
    table_ptr,
    owners_ptr,
    firsts_ptr,
    wide_ptr,
    moved_ptr,
    block_stride,
    block_size,
    table_stride,
    parts,
    scale,
    LATENT: tl.constexpr,  # noqa: N803
    ROTARY: tl.constexpr,  # noqa: N803
    BLOCK_R: tl.constexpr,  # noqa: N803
):
    """A few rows of a block of the copy."""
    part = tl.program_id(0) % parts
    to_block = tl.program_id(0) // parts
    request = tl.load(owners_ptr + to_block).to(tl.int64)
    number = to_block - tl.load(firsts_ptr + request)
    from_block = tl.load(table_ptr + request * table_stride + number)
    if part == 0:
        tl.store(moved_ptr + from_block, to_block)
    row = part * BLOCK_R + tl.arange(0, BLOCK_R)
    held = (row < block_size)[:, None]
    width: tl.constexpr = LATENT + ROTARY
    from_at = blocks_ptr + from_block.to(tl.int64) * block_stride + row[:, None] * width
    to_at = wide_ptr + (to_block.to(tl.int64) * block_size + row[:, None]) * width
    latent = tl.arange(0, LATENT)[None, :]
    rotary = LATENT + tl.arange(0, ROTARY)[None, :]
    # Alignment is promised to the compiler here, and checked before the launch.
    values = tl.load(tl.multiple_of(from_at + latent, (1, 16)), mask=held)
    values = (values.to(tl.float32) * scale).to(tl.bfloat16)
    tl.store(tl.multiple_of(to_at + latent, (1, 16)), values, mask=held)
    values = tl.load(tl.multiple_of(from_at + rotary, (1, 16)), mask=held)
    values = (values.to(tl.float32) * scale).to(tl.bfloat16)
    tl.store(tl.multiple_of(to_at + rotary, (1, 16)), values, mask=held)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=_REMAP_INTEGERS, do_not_specialize_on_alignment=_REMAP_POINTERS
)
def _remap_kernel(  # type: ignore[no-untyped-def]
    topk_ptr,
    counts_ptr,
    moved_ptr,
    topk_token,
    block_rows,
    block_size,
    BLOCK: tl.constexpr,  # noqa: N803
):
    """The keys of one token."""
    token = tl.program_id(0).to(tl.int64)
    count = tl.load(counts_ptr + token)
    for first in range(0, count, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        at = topk_ptr + token * topk_token + slot
        row = tl.load(at, mask=slot < count, other=0)
        to_block = tl.load(moved_ptr + row // block_rows, mask=slot < count, other=0)
        tl.store(at, to_block * block_size + row % block_rows, mask=slot < count)


class _WidenKernel(VllmTritonJitKernel["_WidenKernel.CompileKey"]):
    """The first kernel as vLLM warms it."""

    kernel = _widen_kernel
    bind_launch_inputs = False

    @dataclass(frozen=True)
    class CompileKey:
        """What a variant is compiled for."""

        latent_dim: int
        rotary_dim: int

    def get_warmup_keys(self, dims: MlaDims) -> list[CompileKey]:
        """All variants of a layer: one."""
        return [self.CompileKey(dims.kv_lora_rank, dims.qk_rope_head_dim)]

    def warmup_inputs(self, compile_key: CompileKey) -> dict[str, Any]:
        """Any inputs: nothing of them is part of the key."""
        dtypes = {"blocks_ptr": torch.float8_e4m3fn, "wide_ptr": torch.bfloat16}
        return {
            **{p: TritonWarmupTensor(dtypes.get(p, torch.int32)) for p in _WIDEN_POINTERS},
            **dict.fromkeys(_WIDEN_INTEGERS, 2),
            "scale": 0.5,
            "latent_dim": compile_key.latent_dim,
            "rotary_dim": compile_key.rotary_dim,
            "num_blocks": 1,
        }

    @kernel_launcher  # type: ignore[untyped-decorator]
    def __call__(
        self, *, latent_dim: int, rotary_dim: int, num_blocks: int, **arguments: Any
    ) -> Any:
        return (num_blocks,), {
            **arguments,
            "LATENT": latent_dim,
            "ROTARY": rotary_dim,
            "BLOCK_R": _BLOCK_ROWS,
        }


class _RemapKernel(VllmTritonJitKernel["_RemapKernel.CompileKey"]):
    """The second kernel as vLLM warms it."""

    kernel = _remap_kernel
    bind_launch_inputs = False

    @dataclass(frozen=True)
    class CompileKey:
        """What a variant is compiled for: nothing."""

    def get_warmup_keys(self) -> list[CompileKey]:
        """The one variant."""
        return [self.CompileKey()]

    def warmup_inputs(self, compile_key: CompileKey) -> dict[str, Any]:
        """Any inputs."""
        return {
            **{p: TritonWarmupTensor(torch.int32) for p in _REMAP_POINTERS},
            **dict.fromkeys(_REMAP_INTEGERS, 2),
            "num_blocks": 1,
        }

    @kernel_launcher  # type: ignore[untyped-decorator]
    def __call__(self, *, num_blocks: int, **arguments: Any) -> Any:
        return (num_blocks,), {**arguments, "BLOCK": _BLOCK_KEYS}


WIDEN_KERNEL = _WidenKernel()
REMAP_KERNEL = _RemapKernel()


def warm_up(dims: MlaDims, warm: Callable[..., None]) -> None:
    """Has both launches compiled.

    Args:
        dims: the model's MLA dims.
        warm: called with a kernel and the arguments of its warm-up.
    """
    warm(WIDEN_KERNEL, dims)
    warm(REMAP_KERNEL)


def widen(
    blocks: torch.Tensor,
    table: torch.Tensor,
    owners: torch.Tensor,
    firsts: torch.Tensor,
    scale: float,
    dims: MlaDims,
    *,
    wide: torch.Tensor,
    moved: torch.Tensor,
) -> None:
    """Copies the first blocks of requests, one after the other, as bf16.

    fp8 values are bf16 values, too; a scale that is no power of 2 rounds them as a bf16 cache
    would have.

    Args:
        blocks: ``[B, block_size, D]`` float8_e4m3fn; rows of a block follow each other.
        table: ``[R, width]`` int32, the blocks of each request.
        owners: ``[copied blocks]`` int32, the request of each; a request's follow each other.
        firsts: ``[R]`` int32, where the first block of each request goes.
        scale: value of one unit of ``blocks``.
        dims: the model's MLA dims.
        wide: ``[rows, D]`` bf16, written.
        moved: ``[B]`` int32, written with the place of each block that was copied.

    Raises:
        ValueError: memory that is not aligned.
    """
    _, block_size, width = blocks.shape
    block_stride = blocks.stride(0)
    assert blocks.stride()[1:] == (width, 1)
    assert wide.is_contiguous()
    for name, tensor, stride in (("cache", blocks, block_stride), ("copy", wide, width)):
        if tensor.data_ptr() % 16 or stride % 16:
            raise ValueError(
                f"the {name} lies at {tensor.data_ptr():#x} with a stride of {stride} elements; "
                "keys are widened in pieces of 16 bytes and need multiples of 16"
            )
    parts = triton.cdiv(block_size, _BLOCK_ROWS)
    WIDEN_KERNEL(
        blocks_ptr=blocks,
        table_ptr=table,
        owners_ptr=owners,
        firsts_ptr=firsts,
        wide_ptr=wide,
        moved_ptr=moved,
        block_stride=block_stride,
        block_size=block_size,
        table_stride=table.stride(0),
        parts=parts,
        scale=scale,
        latent_dim=dims.kv_lora_rank,
        rotary_dim=dims.qk_rope_head_dim,
        num_blocks=len(owners) * parts,
    )


def remap(
    topk: torch.Tensor,
    counts: torch.Tensor,
    moved: torch.Tensor,
    *,
    block_rows: int,
    block_size: int,
) -> None:
    """Turns rows of the cache into rows of the copy, in place.

    Args:
        topk: ``[T, K]`` int32 rows of the cache, valid ones first; others stay as they are.
        counts: ``[T]`` int32.
        moved: ``[B]`` int32, the place of each block.
        block_rows: rows from a block of the cache to the next.
        block_size: rows of a block.
    """
    REMAP_KERNEL(
        topk_ptr=topk,
        counts_ptr=counts,
        moved_ptr=moved,
        topk_token=topk.stride(0),
        block_rows=block_rows,
        block_size=block_size,
        num_blocks=len(topk),
    )
