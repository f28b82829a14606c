"""SM100: FLASHINFER_MLA_SPARSE, and what every class with its kernel shares.

Stock sizes the workspace for a whole step and allocates it after memory was profiled. Here launches
are split along tokens, so that a bounded workspace, made while the model loads, always suffices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse import (
    FlashInferMLASparseImpl,
    FlashInferMLASparseMetadata,
    FlashInferMLASparseMetadataBuilder,
    FlashInferMLASparseTRTLLMBackend,
    FlashInferMLASparseTRTLLMMetadataBuilder,
)
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from .. import device_buffer
from ..compat import empty_mask, sleep
from ..compat.adapter import load_adapter
from ..kernels import load_kernel
from ..kernels.base import LaunchBuffers, MlaDims
from ..kernels.split import launch_split
from ..settings import load_settings, user_workspace_bytes
from ..workspace import WorkspacePlan
from .batches import packed, sparse_batch
from .implementation import DcpImplMixin
from .pcp import GatherBuilderMixin, GatherFields, PcpGatherMixin
from .refusing import CapabilityTableMixin, current_settings

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionLayer


_Hook: Any = load_adapter().KernelHook


class SplitLaunchImpl(PcpGatherMixin, _Hook, DcpImplMixin, FlashInferMLASparseImpl):
    """Stock's implementation with the kernel call replaced, and prefill rows under PCP."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        settings = load_settings(config.additional_config)
        self.kernel_is_forced = settings.kernel != "auto"
        self._kernel = load_kernel("trtllm_gen" if settings.kernel == "auto" else settings.kernel)
        self.kernel_names = (self._kernel.name,)
        self._dims = MlaDims(self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim)
        self._max_num_tokens = config.scheduler_config.max_num_batched_tokens
        self._slab_limit_bytes = settings.slab_limit_bytes
        heads = self._kernel_heads(config)
        self._buffers, plan = self._acquire(heads)
        self._plans = {heads: plan}
        self._init_gather()
        self._join_ranks(
            config,
            heads=heads,
            tokens_per_launch=plan.tokens_per_launch,
            gather_rows=self.gather_rows,
        )
        sleep.install()
        empty_mask.install()

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


@dataclass
class DcpFlashInferMLASparseMetadata(FlashInferMLASparseMetadata, GatherFields):
    """Stock's metadata, and what prefill rows gather under PCP."""


class NoSlabBuilder(GatherBuilderMixin, FlashInferMLASparseTRTLLMMetadataBuilder):
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
        self.settle_gather()


class AnyDeviceMixin:
    """A forced reference kernel runs on any device."""

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Whether the kernel runs on a device."""
        if current_settings().kernel == "reference":
            return True
        return super().supports_compute_capability(capability)  # type: ignore[misc]


class DcpFlashInferMLASparseImpl(SplitLaunchImpl):
    """trtllm-gen for every row."""


class DcpFlashInferMLASparseBuilder(NoSlabBuilder):
    """Metadata of FLASHINFER_MLA_SPARSE."""


class DcpFlashInferMLASparseBackend(
    AnyDeviceMixin, CapabilityTableMixin, FlashInferMLASparseTRTLLMBackend
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
