"""SM100: FLASHINFER_MLA_SPARSE, and FLASH_ATTN_MLA_SPARSE_FA4, which prefills with the same kernel.

Stock sizes the workspace for a whole step and allocates it after memory was profiled. Here launches
are split along tokens, so that a bounded workspace, made while the model loads, always suffices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.mla.flashattn_mla_sparse import (
    FlashAttnMLASparseFA4Backend,
    FlashAttnMLASparseFA4Impl,
    FlashAttnMLASparseFA4MetadataBuilder,
)
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse import (
    FlashInferMLASparseImpl,
    FlashInferMLASparseMetadata,
    FlashInferMLASparseMetadataBuilder,
    FlashInferMLASparseTRTLLMBackend,
    FlashInferMLASparseTRTLLMMetadataBuilder,
)
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from .. import agreement, device_buffer
from ..compat import a2a, sleep
from ..kernels import load_kernel
from ..kernels.base import LaunchBuffers, MlaDims
from ..kernels.split import clear_empty_rows, launch_split
from ..settings import load_settings, user_workspace_bytes
from ..topology import gathered_heads
from ..workspace import WorkspacePlan
from .batches import packed, sparse_batch
from .gather import PcpGatherMixin
from .gather_metadata import GatherBuilderMixin, GatherFields
from .refusing import CapabilityTableMixin, current_settings

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionLayer


class _SplitLaunchImpl(PcpGatherMixin, FlashInferMLASparseImpl):
    """Stock's implementation with the kernel call replaced, and prefill rows under PCP."""

    # Every token brings its own top-k row, filtered by rank and interleave, and the indexer bounds
    # each token's keys after MTP tokens are expanded: no interleave is special.
    supports_mtp_with_cp_non_trivial_interleave_size = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        parallel = config.parallel_config
        settings = load_settings(config.additional_config)
        self.kernel_is_forced = settings.kernel != "auto"
        self._kernel = load_kernel(settings.kernel if self.kernel_is_forced else "trtllm_gen")
        self._dims = MlaDims(self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim)
        self._max_num_tokens = config.scheduler_config.max_num_batched_tokens
        self._slab_limit_bytes = settings.slab_limit_bytes
        heads = gathered_heads(
            self.num_heads,
            parallel.tensor_parallel_size,
            parallel.prefill_context_parallel_size,
            parallel.decode_context_parallel_size,
        )
        self._buffers, plan = self._acquire(heads)
        self._plans = {heads: plan}
        self._init_gather()
        agreement.check(
            config,
            backend=type(self).__name__,
            kernel=self._kernel.name,
            heads=heads,
            tokens_per_launch=plan.tokens_per_launch,
            gather_rows=self.gather_plan.rows_per_rank if self.gather_plan else 0,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        sleep.install()
        a2a.install()

    def _acquire(self, heads: int) -> tuple[LaunchBuffers, WorkspacePlan]:
        return device_buffer.acquire(
            device_buffer.kernel_device(),
            heads,
            self._max_num_tokens,
            slab_limit_bytes=self._slab_limit_bytes,
            workspace_bytes=user_workspace_bytes(),
        )

    def _attend(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        counts: torch.Tensor,
        layer: AttentionLayer,
        block_size: int,
        *,
        out: torch.Tensor | None = None,
        with_lse: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attends T tokens.

        Args:
            q: ``[T, H, D]``, or its latent and rotary parts.
            kv_cache: ``[blocks, block_size, D]``, block strides of whole rows.
            topk_indices: ``[T, K]`` int32 physical rows, valid ones first.
            counts: ``[T]`` int32.
            layer: holds the checkpoint's scales.
            block_size: rows of a block.
            out: ``[T, H, kv_lora_rank]`` bf16 to write to; None makes one.
            with_lse: whether the LSE is wanted under DCP.

        Returns:
            ``out [T, H, kv_lora_rank]`` bf16 and, where wanted, ``lse [T, H]`` float32 in the base
            that this class declares.
        """
        query = packed(q)
        # A checkpoint may hold scales that a bf16 cache was never quantised with.
        quantized = is_quantized_kv_cache(self.kv_cache_dtype)
        batch = sparse_batch(
            query,
            kv_cache.view(query.dtype),
            topk_indices,
            counts,
            block_size=block_size,
            softmax_scale=self.scale,
            query_scale=layer._q_scale_float if quantized else 1.0,
            cache_scale=layer._k_scale_float if quantized else 1.0,
            dims=self._dims,
            with_lse=with_lse and self.need_to_return_lse_for_decode,
            out=out,
        )
        heads, lse = query.shape[1], batch.lse
        if heads not in self._plans:
            self._plans[heads] = self._acquire(heads)[1]
        launch_split(self._kernel, batch, self._buffers, self._plans[heads])
        if lse is not None and self.lse_base_on_e and self._kernel.lse_base == "2":
            lse.mul_(math.log(2.0))
        return batch.out, lse

    def _forward_mqa_kernel(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        valid_counts: torch.Tensor,
        *,
        layer: AttentionLayer,
        block_size: int,
        is_decode: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._attend(q, kv_cache, topk_indices, valid_counts, layer, block_size)


@dataclass
class DcpFlashInferMLASparseMetadata(FlashInferMLASparseMetadata, GatherFields):
    """Stock's metadata, and what prefill rows gather under PCP."""


class _NoSlabBuilder(GatherBuilderMixin, FlashInferMLASparseTRTLLMMetadataBuilder):
    """Stock's builder without the workspace it allocates under DCP."""

    metadata_cls = DcpFlashInferMLASparseMetadata

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        parent = (
            FlashInferMLASparseMetadataBuilder
            if vllm_config.parallel_config.decode_context_parallel_size > 1
            else FlashInferMLASparseTRTLLMMetadataBuilder
        )
        parent.__init__(self, kv_cache_spec, layer_names, vllm_config, device)


class _AnyDeviceMixin:
    """A forced reference kernel runs on any device."""

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Whether the kernel runs on a device."""
        if current_settings().kernel == "reference":
            return True
        return super().supports_compute_capability(capability)  # type: ignore[misc]


class DcpFlashInferMLASparseImpl(_SplitLaunchImpl):
    """trtllm-gen for every row."""


class DcpFlashInferMLASparseBuilder(_NoSlabBuilder):
    """Metadata of FLASHINFER_MLA_SPARSE."""


class DcpFlashInferMLASparseBackend(
    _AnyDeviceMixin, CapabilityTableMixin, FlashInferMLASparseTRTLLMBackend
):
    """FLASHINFER_MLA_SPARSE on SM100 under DCP."""

    stock_refuses_pcp_with_dcp = True

    @staticmethod
    def get_impl_cls() -> type[DcpFlashInferMLASparseImpl]:
        """The implementation vLLM builds for each layer."""
        return DcpFlashInferMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type[DcpFlashInferMLASparseBuilder]:
        """The builder vLLM makes for each group of layers."""
        return DcpFlashInferMLASparseBuilder


class DcpFlashAttnMLASparseFA4Impl(_SplitLaunchImpl, FlashAttnMLASparseFA4Impl):
    """FlashAttention 4 for decode steps, trtllm-gen for steps with prefill."""

    def _forward_mqa_kernel(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        valid_counts: torch.Tensor,
        *,
        layer: AttentionLayer,
        block_size: int,
        is_decode: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not is_decode or self.kernel_is_forced:
            return self._attend(q, kv_cache, topk_indices, valid_counts, layer, block_size)
        out, lse = FlashAttnMLASparseFA4Impl._forward_mqa_kernel(
            self,
            q,
            kv_cache,
            topk_indices,
            valid_counts,
            layer=layer,
            block_size=block_size,
            is_decode=True,
        )
        if lse is not None:
            clear_empty_rows(out, lse, valid_counts)
        return out, lse


class DcpFlashAttnMLASparseFA4Builder(_NoSlabBuilder, FlashAttnMLASparseFA4MetadataBuilder):
    """Metadata of FLASH_ATTN_MLA_SPARSE_FA4."""


class DcpFlashAttnMLASparseFA4Backend(
    _AnyDeviceMixin, CapabilityTableMixin, FlashAttnMLASparseFA4Backend
):
    """FLASH_ATTN_MLA_SPARSE_FA4 on SM100 under DCP; it shares the workspace."""

    stock_refuses_pcp_with_dcp = True

    @staticmethod
    def get_impl_cls() -> type[DcpFlashAttnMLASparseFA4Impl]:
        """The implementation vLLM builds for each layer."""
        return DcpFlashAttnMLASparseFA4Impl

    @staticmethod
    def get_builder_cls() -> type[DcpFlashAttnMLASparseFA4Builder]:
        """The builder vLLM makes for each group of layers."""
        return DcpFlashAttnMLASparseFA4Builder
