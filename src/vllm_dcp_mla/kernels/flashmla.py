"""FlashMLA's sparse forward kernel as vLLM ships it, for Hopper and a bf16 cache.

The only file that touches FlashMLA.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from ..capability_rules import FLASHMLA_SPARSE_HEADS, FLASHMLA_TOPK_MULTIPLE
from ..key_splits import num_spreads
from ..merge import LseBase
from ..settings import KernelName
from .base import LaunchBuffers, LaunchShape, SparseMlaBatch
from .finish import finish
from .spread import merge, spread


class FlashMlaKernel:
    """``flash_mla_sparse_fwd``, whose LSE of a row without tokens is +inf, and what surrounds it.

    It takes as long as its longest token, so that the keys of a small batch are split around it.

    Args:
        num_sms: multiprocessors of the GPU.
        rows: keys that a token is expected to have here; None for all of its top-k.
        parts: of every token's keys; None to choose by shape.
    """

    name: ClassVar[KernelName] = "flashmla"
    lse_base: ClassVar[LseBase] = "e"
    clears_empty_rows: ClassVar[bool] = True

    def __init__(self, num_sms: int, rows: int | None = None, parts: int | None = None) -> None:
        self._num_sms = num_sms
        self._rows = rows
        self._parts = parts
        from vllm.v1.attention.ops.flashmla import is_flashmla_sparse_supported

        usable, reason = is_flashmla_sparse_supported()
        if not usable:
            raise ImportError(f"FlashMLA cannot be used: {reason}")
        from vllm.third_party.flashmla.flash_mla_interface import flash_mla_sparse_fwd

        self._forward = flash_mla_sparse_fwd

    def supports(self, shape: LaunchShape) -> str | None:
        """See :class:`.base.SparseMlaKernel`."""
        if shape.cache_dtype != torch.bfloat16:
            return f"it reads a bf16 cache, got {shape.cache_dtype}"
        if shape.heads not in FLASHMLA_SPARSE_HEADS:
            heads = ", ".join(map(str, FLASHMLA_SPARSE_HEADS))
            return f"it takes {heads} query heads, got {shape.heads}"
        if shape.topk % FLASHMLA_TOPK_MULTIPLE:
            return f"it takes a multiple of {FLASHMLA_TOPK_MULTIPLE} keys, got {shape.topk}"
        if (shape.dims.kv_lora_rank, shape.dims.qk_rope_head_dim) != (512, 64):
            return f"it takes 512 latent and 64 rotary dims, got {shape.dims}"
        return None

    def launch(self, batch: SparseMlaBatch, buffers: LaunchBuffers) -> None:
        """See :class:`.base.SparseMlaKernel`; ``batch.out`` is contiguous.

        ``buffers.workspace`` holds :func:`..key_splits.partial_bytes` bytes.
        """
        tokens, heads, _ = batch.query.shape
        if not tokens:
            return
        topk = batch.topk.shape[1]
        parts = self._parts or num_spreads(tokens, heads, topk, self._rows or topk, self._num_sms)
        if parts == 1:
            finish(batch, self._attend(batch))
        else:
            cut = spread(batch, parts, buffers)
            merge(batch, cut, self._attend(cut))

    def _attend(self, batch: SparseMlaBatch) -> torch.Tensor:
        """Writes ``batch.out``; its LSE ``[T, H]``, natural."""
        _, _, lse = self._forward(
            batch.query,
            batch.cache_rows.unsqueeze(1),
            batch.topk.unsqueeze(1),
            batch.softmax_scale,
            d_v=batch.dims.kv_lora_rank,
            topk_length=batch.counts,
            out=batch.out,
        )
        return lse
