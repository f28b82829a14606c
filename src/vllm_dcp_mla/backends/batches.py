"""What vLLM hands to an attention implementation, as one launch's batch."""

from __future__ import annotations

import math

import torch
from vllm.v1.attention.backends.mla.sparse_utils import flat_kv_row_view

from ..kernels.base import MlaDims, SparseMlaBatch


def packed(q: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The query as one tensor; without a rotary part its latent part is all of it."""
    if not isinstance(q, tuple):
        return q
    latent, rotary = q
    if rotary.shape[-1] == 0 and latent.is_contiguous():
        return latent
    return torch.cat(q, dim=-1)


def sparse_batch(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    topk_indices: torch.Tensor,
    counts: torch.Tensor,
    *,
    block_size: int,
    softmax_scale: float,
    query_scale: float,
    cache_scale: float,
    dims: MlaDims,
    with_lse: bool,
    out: torch.Tensor | None = None,
) -> SparseMlaBatch:
    """Tokens to attend, with memory for the results.

    Args:
        query: ``[T, H, D]``.
        kv_cache: ``[blocks, block_size, D]``, block strides of whole rows.
        topk_indices: ``[T, K]`` int32 physical rows, valid ones first.
        counts: ``[T]`` int32.
        block_size: rows of a block.
        softmax_scale, query_scale, cache_scale, dims: as the batch has them.
        with_lse: whether the LSE is wanted.
        out: ``[T, H, kv_lora_rank]`` bf16 to write to; None makes one.
    """
    rows, block_stride = flat_kv_row_view(kv_cache, block_size)
    tokens, heads, _ = query.shape
    lse = None
    if with_lse:
        lse = torch.empty(tokens, heads, dtype=torch.float32, device=query.device)
    if out is None:
        shape = (tokens, heads, dims.kv_lora_rank)
        out = torch.empty(shape, dtype=torch.bfloat16, device=query.device)
    return SparseMlaBatch(
        query=query,
        cache_rows=rows,
        page_size=math.gcd(block_stride, block_size, 64),
        topk=topk_indices,
        counts=counts,
        softmax_scale=softmax_scale,
        query_scale=query_scale,
        cache_scale=cache_scale,
        dims=dims,
        out=out,
        lse=lse,
    )
