"""Splits each token's keys for a kernel that does not: every part becomes a token of its own.

One launch before the kernel copies queries and cuts the selection, one behind merges the parts. A
small batch then fills the GPU: a library's kernel takes as long as its longest token.

On an H200, in microseconds to spread, attend and merge: 16 tokens of 512 keys in 4 parts 3.5, 10.5
and 3.3; of 2,048 in 8 parts 4.7, 20.6 and 4; 8 of 2,048 in 16 parts 4.4, 13.2 and 4. FlashMLA's
kernel takes 8.3 for one part of 128 keys, of which 5 pass before its first key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.model_executor.warmup.jit_warmup import kernel_launcher
from vllm.model_executor.warmup.jit_warmup_triton_helper import (
    TritonWarmupTensor,
    VllmTritonJitKernel,
)
from vllm.triton_utils import tl, triton

from ..key_splits import SPREAD_KEYS, head_blocks, spread_width
from .base import LaunchBuffers, MlaDims, SparseMlaBatch, refuse_unaligned
from .merge_parts import MERGE_KERNEL
from .triton_bodies import share_of_keys

SPREAD_POINTERS = (
    *("query_ptr", "topk_ptr", "counts_ptr", "part_query_ptr", "part_topk_ptr", "part_counts_ptr"),
)
SPREAD_INTEGERS = ("query_token", "query_head", "topk_token", "heads", "splits", "width")
_BLOCK_HEADS = 16


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=SPREAD_INTEGERS, do_not_specialize_on_alignment=SPREAD_POINTERS
)
def _spread_kernel(  # type: ignore[no-untyped-def]
    query_ptr,
    topk_ptr,
    counts_ptr,
    part_query_ptr,
    part_topk_ptr,
    part_counts_ptr,
    query_token,
    query_head,
    topk_token,
    heads,
    splits,
    width,
    LATENT: tl.constexpr,  # noqa: N803
    ROTARY: tl.constexpr,  # noqa: N803
    BLOCK_H: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
):
    """A block of heads of one part; the first of them cuts the selection, too."""
    blocks = tl.cdiv(heads, BLOCK_H)
    part = (tl.program_id(0) // blocks).to(tl.int64)
    head_block = tl.program_id(0) % blocks
    token = part // splits
    count = tl.load(counts_ptr + token)
    share = share_of_keys(count, splits, BLOCK_N)
    begin = tl.minimum((part % splits).to(tl.int32) * share, count)
    found = tl.minimum(share, count - begin)
    if head_block == 0:
        tl.store(part_counts_ptr + part, found)
        for first in range(0, width, BLOCK_N):
            slot = first + tl.arange(0, BLOCK_N)
            row_at = topk_ptr + token * topk_token + begin + slot
            row = tl.load(row_at, mask=slot < found, other=-1)
            tl.store(part_topk_ptr + part * width + slot, row)
    if found > 0:
        head = head_block * BLOCK_H + tl.arange(0, BLOCK_H)
        held = (head < heads)[:, None]
        from_at = query_ptr + token * query_token + head[:, None] * query_head
        to_at = part_query_ptr + (part * heads + head[:, None]) * (LATENT + ROTARY)
        latent = tl.arange(0, LATENT)[None, :]
        rotary = LATENT + tl.arange(0, ROTARY)[None, :]
        # Alignment is promised to the compiler here, and checked before the launch.
        query = tl.load(tl.multiple_of(from_at + latent, (1, 16)), mask=held)
        tl.store(tl.multiple_of(to_at + latent, (1, 16)), query, mask=held)
        query = tl.load(tl.multiple_of(from_at + rotary, (1, 16)), mask=held)
        tl.store(tl.multiple_of(to_at + rotary, (1, 16)), query, mask=held)


class _SpreadKernel(VllmTritonJitKernel["_SpreadKernel.CompileKey"]):
    """The kernel as vLLM warms it."""

    kernel = _spread_kernel
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
        dtypes = dict.fromkeys(("query_ptr", "part_query_ptr"), torch.bfloat16)
        return {
            **{p: TritonWarmupTensor(dtypes.get(p, torch.int32)) for p in SPREAD_POINTERS},
            **dict.fromkeys(SPREAD_INTEGERS, 2),
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
            "BLOCK_H": _BLOCK_HEADS,
            "BLOCK_N": SPREAD_KEYS,
        }


SPREAD_KERNEL = _SpreadKernel()


def warm_up(dims: MlaDims, warm: Callable[..., None]) -> None:
    """Has both launches compiled.

    Args:
        dims: the model's MLA dims.
        warm: called with a kernel and the arguments of its warm-up.
    """
    warm(SPREAD_KERNEL, dims)
    warm(MERGE_KERNEL, dims, torch.bfloat16, SPREAD_KEYS)


def spread(batch: SparseMlaBatch, parts: int, buffers: LaunchBuffers) -> SparseMlaBatch:
    """The parts of every token of a batch, as a batch of their own whose LSE is left to the kernel.

    Args:
        batch: T tokens.
        parts: of each token's keys, P; a short row has none for its last ones.
        buffers: whose workspace holds :func:`..key_splits.partial_bytes` bytes; queries and outputs
            of the parts lie there.

    Returns:
        ``T x P`` tokens of up to ``spread_width(K, P)`` keys, those of a token one after the other.

    Raises:
        ValueError: see :func:`.base.refuse_unaligned`.
    """
    refuse_unaligned(batch)
    tokens, heads, head_dim = batch.query.shape
    latent, device = batch.dims.kv_lora_rank, batch.query.device
    total, width = tokens * parts, spread_width(batch.topk.shape[1], parts)
    memory = buffers.workspace.view(torch.bfloat16)
    outs = total * heads * latent
    query = memory[outs : outs + total * heads * head_dim].view(total, heads, head_dim)
    topk = torch.empty(total, width, dtype=torch.int32, device=device)
    counts = torch.empty(total, dtype=torch.int32, device=device)
    SPREAD_KERNEL(
        query_ptr=batch.query,
        topk_ptr=batch.topk,
        counts_ptr=batch.counts,
        part_query_ptr=query,
        part_topk_ptr=topk,
        part_counts_ptr=counts,
        query_token=batch.query.stride(0),
        query_head=batch.query.stride(1),
        topk_token=batch.topk.stride(0),
        heads=heads,
        splits=parts,
        width=width,
        latent_dim=latent,
        rotary_dim=batch.dims.qk_rope_head_dim,
        num_blocks=total * head_blocks(heads, _BLOCK_HEADS),
    )
    out = memory[:outs].view(total, heads, latent)
    return replace(batch, query=query, topk=topk, counts=counts, out=out, lse=None)


def merge(batch: SparseMlaBatch, spread_out: SparseMlaBatch, lse: torch.Tensor) -> None:
    """Writes ``batch.out`` and, where wanted, ``batch.lse``; (0, -inf) for rows without keys.

    Args:
        batch: what was spread.
        spread_out: its parts, attended; what parts without keys hold is not read.
        lse: ``[T x P, H]`` float32, natural, without gaps.
    """
    assert lse.is_contiguous()
    tokens, heads, latent = batch.out.shape
    target = batch.lse
    if target is None:
        target = torch.empty(tokens, heads, dtype=torch.float32, device=lse.device)
    MERGE_KERNEL(
        partial_out_ptr=spread_out.out,
        partial_lse_ptr=lse,
        counts_ptr=batch.counts,
        out_ptr=batch.out,
        lse_ptr=target,
        out_token=batch.out.stride(0),
        out_head=batch.out.stride(1),
        lse_token=target.stride(0),
        heads=heads,
        splits=len(spread_out.query) // tokens,
        latent_dim=latent,
        block_keys=SPREAD_KEYS,
        num_blocks=tokens * heads,
    )
