"""SM100: FLASH_ATTN_MLA_SPARSE_FA4, whose prefill is FLASHINFER_MLA_SPARSE's kernel.

Only where stock has it: with vLLM 0.33.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.v1.attention.backends.mla.flashattn_mla_sparse import (
    FlashAttnMLASparseFA4Backend,
    FlashAttnMLASparseFA4Impl,
    FlashAttnMLASparseFA4MetadataBuilder,
)

from ..kernels.split import clear_empty_rows
from .refusing import CapabilityTableMixin
from .trtllm import AnyDeviceMixin, NoSlabBuilder, SplitLaunchImpl

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionLayer


class DcpFlashAttnMLASparseFA4Impl(SplitLaunchImpl, FlashAttnMLASparseFA4Impl):
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


class DcpFlashAttnMLASparseFA4Builder(NoSlabBuilder, FlashAttnMLASparseFA4MetadataBuilder):
    """Metadata of FLASH_ATTN_MLA_SPARSE_FA4."""


class DcpFlashAttnMLASparseFA4Backend(
    AnyDeviceMixin, CapabilityTableMixin, FlashAttnMLASparseFA4Backend
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
