"""FlashAttention 3 as vLLM ships it, for Hopper and a bf16 cache: pages of one row, latent as q_v.

The only file that touches FlashAttention 3.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from ..merge import LseBase
from ..settings import KernelName
from .base import LaunchBuffers, LaunchShape, SparseMlaBatch
from .finish import finish


class FlashAttn3Kernel:
    """``flash_attn_varlen_func``: every token is a sequence of its own, its top-k row its pages."""

    name: ClassVar[KernelName] = "flash_attn3"
    lse_base: ClassVar[LseBase] = "e"
    clears_empty_rows: ClassVar[bool] = True

    def __init__(self) -> None:
        from vllm.vllm_flash_attn import flash_attn_interface as library

        if not library.is_fa_version_supported(3):
            reason = library.fa_version_unsupported_reason(3)
            raise ImportError(f"FlashAttention 3 cannot be used: {reason}")
        self._forward = library.flash_attn_varlen_func

    def supports(self, shape: LaunchShape) -> str | None:
        """See :class:`.base.SparseMlaKernel`."""
        if shape.cache_dtype != torch.bfloat16:
            return f"it reads a bf16 cache, got {shape.cache_dtype}"
        if (shape.dims.kv_lora_rank, shape.dims.qk_rope_head_dim) != (512, 64):
            return f"it takes 512 latent and 64 rotary dims, got {shape.dims}"
        return None

    def launch(self, batch: SparseMlaBatch, buffers: LaunchBuffers) -> None:
        """See :class:`.base.SparseMlaKernel`."""
        tokens, _, _ = batch.query.shape
        latent = batch.dims.kv_lora_rank
        pages = batch.cache_rows[:, None, None]
        _, lse = self._forward(
            q=batch.query[..., latent:],
            k=pages[..., latent:],
            v=pages[..., :latent],
            q_v=batch.query[..., :latent],
            max_seqlen_q=1,
            cu_seqlens_q=torch.arange(tokens + 1, dtype=torch.int32, device=batch.query.device),
            max_seqlen_k=batch.topk.shape[1],
            seqused_k=batch.counts,
            block_table=batch.topk,
            softmax_scale=batch.softmax_scale,
            causal=False,
            return_softmax_lse=True,
            out=batch.out,
            fa_version=3,
        )[:2]
        finish(batch, lse.T)
