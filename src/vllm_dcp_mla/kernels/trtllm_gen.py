"""trtllm-gen's sparse MLA decode kernel, through FlashInfer. SM100 only.

The only file that touches FlashInfer.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from ..capability_rules import trtllm_gen_heads
from ..compat.flashinfer import FUNCTION, REQUIRED_ARGUMENTS
from ..merge import LseBase
from ..settings import KernelName
from .base import LaunchBuffers, LaunchShape, SparseMlaBatch

#: Arguments that are passed where the installed FlashInfer has them.
COUNTERS_ARGUMENT = "multi_ctas_kv_counter_buffer"  # since 0.6.18
LSE_BASE_ARGUMENT = "return_lse_base"
NOPE_ARGUMENT = "sparse_mla_top_k_lens"


class TrtllmGenKernel:
    """trtllm-gen, pinned: ``backend="auto"`` could pick a kernel with a natural-log LSE."""

    name: ClassVar[KernelName] = "trtllm_gen"
    lse_base: ClassVar[LseBase] = "2"
    clears_empty_rows: ClassVar[bool] = False

    def __init__(self) -> None:
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache_mla

        arguments = inspect.signature(trtllm_batch_decode_with_kv_cache_mla).parameters
        missing = [name for name in REQUIRED_ARGUMENTS if name not in arguments]
        if missing:
            raise ImportError(
                f"flashinfer.decode.{FUNCTION} lacks {', '.join(missing)}; install the "
                "flashinfer-python that this vLLM pins."
            )
        self._decode = trtllm_batch_decode_with_kv_cache_mla
        self._takes_counters = COUNTERS_ARGUMENT in arguments
        self._takes_lse_base = LSE_BASE_ARGUMENT in arguments

    def supports(self, shape: LaunchShape) -> str | None:
        """See :class:`.base.SparseMlaKernel`."""
        return trtllm_gen_heads(shape.heads)

    def launch(self, batch: SparseMlaBatch, buffers: LaunchBuffers) -> None:
        """See :class:`.base.SparseMlaKernel`; a NoPE batch must not hold rows without tokens."""
        width = batch.topk.shape[1]
        optional: dict[str, Any] = {}
        if self._takes_counters:
            # Without it FlashInfer allocates and zeroes one in every call.
            optional[COUNTERS_ARGUMENT] = buffers.counters
        if self._takes_lse_base:
            optional[LSE_BASE_ARGUMENT] = "base2"
        if batch.dims.is_nope:
            optional[NOPE_ARGUMENT] = batch.counts
        self._decode(
            query=batch.query.unsqueeze(1),  # q_len 1: every token has its own top-k row
            kv_cache=batch.cache_rows.view(-1, 1, batch.page_size, batch.cache_rows.shape[-1]),
            workspace_buffer=buffers.workspace,
            qk_nope_head_dim=batch.dims.qk_nope_head_dim,
            kv_lora_rank=batch.dims.kv_lora_rank,
            qk_rope_head_dim=batch.dims.qk_rope_head_dim,
            block_tables=batch.topk.unsqueeze(1),
            seq_lens=batch.counts,
            # The width is the capacity of a row; counts bound what is read of it.
            max_seq_len=width,
            sparse_mla_top_k=width,
            out=batch.out.unsqueeze(1),
            bmm1_scale=batch.softmax_scale * batch.query_scale * batch.cache_scale,
            bmm2_scale=batch.cache_scale,
            backend="trtllm-gen",
            lse=batch.lse,
            return_lse=batch.lse is not None,
            **optional,
        )
