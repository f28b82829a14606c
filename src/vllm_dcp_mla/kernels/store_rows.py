"""Writes rows that are bytes of a cache already to their slots, in Triton; nothing is converted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.warmup.jit_warmup import kernel_launcher
from vllm.model_executor.warmup.jit_warmup_triton_helper import (
    TritonWarmupTensor,
    VllmTritonJitKernel,
)
from vllm.triton_utils import tl, triton

_WORD = torch.int32  # rows are moved as words of it
_POINTERS = ("rows_ptr", "slots_ptr", "cache_ptr")
_INTEGERS = ("row_stride", "block_size", "block_stride")


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_POINTERS
)
def _store_rows_kernel(  # type: ignore[no-untyped-def]
    rows_ptr,
    row_stride,
    slots_ptr,
    cache_ptr,
    block_size,
    block_stride,
    ROW_WORDS: tl.constexpr,  # noqa: N803
    SCALE_WORDS: tl.constexpr,  # noqa: N803
    PADDED: tl.constexpr,  # noqa: N803
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    row = rows_ptr + token * row_stride
    block = cache_ptr + slot // block_size * block_stride
    inside = slot % block_size
    word = tl.arange(0, PADDED)
    values = tl.load(row + word, mask=word < ROW_WORDS)
    tl.store(block + inside * ROW_WORDS + word, values, mask=word < ROW_WORDS)
    for i in tl.static_range(SCALE_WORDS):
        scale = tl.load(row + ROW_WORDS + i)
        tl.store(block + block_size * ROW_WORDS + inside * SCALE_WORDS + i, scale)


class _StoreRowsKernel(VllmTritonJitKernel["_StoreRowsKernel.CompileKey"]):
    """The kernel as vLLM warms it."""

    kernel = _store_rows_kernel
    bind_launch_inputs = False

    @dataclass(frozen=True)
    class CompileKey:
        """What a variant is compiled for: words of a row and of its scales."""

        row_words: int
        scale_words: int

    def get_warmup_keys(self, row_bytes: int, scale_bytes: int) -> list[CompileKey]:
        """The one variant of a cache; bytes of its rows, and of their scales."""
        return [self.CompileKey(row_bytes // _WORD.itemsize, scale_bytes // _WORD.itemsize)]

    def warmup_inputs(self, compile_key: CompileKey) -> dict[str, Any]:
        """Any inputs: nothing of them is part of the key."""
        return {
            **dict.fromkeys(("rows_ptr", "cache_ptr"), TritonWarmupTensor(_WORD)),
            "slots_ptr": TritonWarmupTensor(torch.int64),
            **dict.fromkeys(_INTEGERS, 2),
            "key": compile_key,
            "num_tokens": 1,
        }

    @kernel_launcher  # type: ignore[untyped-decorator]
    def __call__(self, *, key: CompileKey, num_tokens: int, **arguments: Any) -> Any:
        return (num_tokens,), {
            **arguments,
            "ROW_WORDS": key.row_words,
            "SCALE_WORDS": key.scale_words,
            "PADDED": triton.next_power_of_2(key.row_words),
        }


STORE_ROWS_KERNEL = _StoreRowsKernel()


def store_rows(
    rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, *, scale_bytes: int = 0
) -> None:
    """Copies each row to its slot; rows of negative slots are dropped.

    Args:
        rows: ``[T, N]`` of any dtype, contiguous rows; the first bytes of each are what a cache
            row holds, its scales last. More rows than slots are padding, as for vLLM's own kernel.
        cache: ``[blocks, block_size, row bytes + scale_bytes]`` of a one-byte dtype. A block holds
            its rows one after the other, then their scales.
        slots: ``[T]`` int64, ``block * block_size + row in block``.
        scale_bytes: of a row; a multiple of 4, as row bytes are.
    """
    num_tokens = min(len(rows), len(slots))
    if not num_tokens:
        return
    words, blocks = rows.view(_WORD), cache.view(torch.uint8).view(_WORD)
    _, block_size, row_words = blocks.shape
    scale_words = scale_bytes // _WORD.itemsize
    STORE_ROWS_KERNEL(
        rows_ptr=words,
        row_stride=words.stride(0),
        slots_ptr=slots,
        cache_ptr=blocks,
        block_size=block_size,
        block_stride=blocks.stride(0),
        key=STORE_ROWS_KERNEL.CompileKey(row_words - scale_words, scale_words),
        num_tokens=num_tokens,
    )
