"""SM90, with vLLM 0.33: FLASH_ATTN_MLA_SPARSE, the first sparse backend that vLLM asks there.

Stock has no backend that serves DCP from a bf16 or fp8_e4m3 cache on Hopper. This one reads the
query packed and in bf16. Our kernel reads an fp8 cache as it is; long prefills attend a bf16 copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.sparse_mla_attention import SparseMLACommonImpl
from vllm.v1.attention.backends.mla.flashattn_mla_sparse import (
    FlashAttnMLASparseBackend,
    FlashAttnMLASparseMetadata,
    FlashAttnMLASparseMetadataBuilder,
)
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from .. import device_buffer
from ..compat import flat_cache, sleep
from ..gather_plan import PAGE_ROWS
from ..kernel_choice import MANY_TOKENS
from ..kernels import finish, spread, triton_decode, widen
from ..kernels.base import LaunchShape, MlaDims
from ..kernels.split import clear_empty_rows
from ..key_splits import tilings_of
from ..settings import load_settings
from ..warmup import warm
from .batches import packed, sparse_batch
from .hopper_kernels import OURS, KernelTable, logger
from .implementation import DcpImplMixin
from .pcp import GatherBuilderMixin, GatherFields, PcpGatherMixin
from .refusing import CapabilityTableMixin
from .wide_keys import WideKeysMixin
from .wide_metadata import WideFields, WideKeysBuilderMixin

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionLayer

    from .gather import GatheredPart


class DcpFlashAttnMLASparseImpl(
    WideKeysMixin, PcpGatherMixin, DcpImplMixin, SparseMLACommonImpl[FlashAttnMLASparseMetadata]
):
    """Kernels by a launch's shape: ours, and libraries', which read keys of bf16, or widened."""

    supports_dcp = True
    can_return_lse_for_decode = True
    lse_base_on_e = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        self._is_quantized = is_quantized_kv_cache(self.kv_cache_dtype)
        if self.kv_cache_dtype == "fp8":
            logger.info_once(
                "The fp8 KV cache is fp8_e4m3 with one scale: FLASHMLA_SPARSE does not serve "
                "fp8_ds_mla in this configuration."
            )
        heads = self._kernel_heads(config)
        topk = config.model_config.hf_text_config.index_topk
        self._shape = LaunchShape(
            heads=heads,
            topk=topk,
            cache_dtype=torch.float8_e4m3fn if self._is_quantized else torch.bfloat16,
            dims=MlaDims(self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim),
        )
        # Keys of a token that this rank holds, about.
        self._rows = topk // config.parallel_config.decode_context_parallel_size
        device = device_buffer.kernel_device()
        forced = load_settings(config.additional_config).kernel
        self._kernels = KernelTable(self._shape, forced, device_buffer.num_sms(device))
        self._buffers = device_buffer.acquire_partials(device, self.kv_lora_rank)
        self._init_gather()
        kinds = [(heads, self._rows)]
        if self.gather_rows:  # under PCP prefill rows have this rank's heads only, and all keys
            kinds.append((self.num_heads, topk))
        kernels = [self._kernels.at(*kind, self._shape.cache_dtype) for kind in kinds]
        if self._is_quantized and forced == "auto":
            wide = self._kernels.at(*kinds[-1], torch.bfloat16)  # of prefill rows
            self.widens_keys = wide.of(MANY_TOKENS).name != OURS
            kernels += [wide] if self.widens_keys else []
        self.kernel_names = tuple(dict.fromkeys(name for made in kernels for name in made.names))
        self._warm_up(partial(warm, config, device), kinds)
        sleep.install()
        _register_indexer_kernels(config)
        flat_cache.install(DcpFlashAttnMLASparseBackend)
        self._join_ranks(config, heads=heads, gather_rows=self.gather_rows)

    def _warm_up(self, compiled: Callable[..., None], kinds: list[tuple[int, int]]) -> None:
        """Has all kernels of ours compiled that launches of (heads, rows) of a token may take."""
        dims = self._shape.dims
        tilings = dict.fromkeys(tiling for kind in kinds for tiling in tilings_of(*kind))
        triton_decode.warm_up(self._shape.cache_dtype, dims, tilings, compiled)
        if self.kernel_names != (OURS,):  # what follows a library's kernel
            finish.warm_up(dims, compiled)
        if "flashmla" in self.kernel_names and not self._is_quantized:
            spread.warm_up(dims, compiled)
        if self.widens_keys:
            widen.warm_up(dims, compiled)

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
        if self._wide is not None and self._wide.chunks:
            return self._attend_widened(
                packed(q), kv_cache, topk_indices, valid_counts, layer, block_size
            )
        return self._attend(q, kv_cache, topk_indices, valid_counts, layer, block_size)

    def _attend_range(
        self, part: GatheredPart, layer: AttentionLayer, *, with_lse: bool
    ) -> torch.Tensor | None:
        """Writes ``part.out``; returns the LSE ``[T, H]`` where it is wanted."""
        _, lse = self._attend(
            *(part.query, part.keys, part.topk, part.counts, layer, PAGE_ROWS),
            out=part.out,
            with_lse=with_lse,
            rows=self._shape.topk,
        )
        return lse

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
        rows: int | None = None,
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
            rows: keys that a token is expected to have; None for this rank's share of them.

        Returns:
            ``out [T, H, kv_lora_rank]`` bf16 and, where wanted, ``lse [T, H]`` float32, natural.
        """
        query = packed(q)
        is_wide = kv_cache.dtype == torch.bfloat16
        batch = sparse_batch(
            query,
            kv_cache if is_wide else kv_cache.view(self._shape.cache_dtype),
            topk_indices,
            counts,
            block_size=block_size,
            softmax_scale=self.scale,
            query_scale=1.0,
            # A checkpoint may hold scales that a bf16 cache was never quantised with.
            cache_scale=1.0 if is_wide else layer._k_scale_float,
            dims=self._shape.dims,
            with_lse=with_lse and self.need_to_return_lse_for_decode,
            out=out,
        )
        tokens, heads, _ = query.shape
        if tokens:
            kernels = self._kernels.at(heads, rows or self._rows, batch.cache_rows.dtype)
            kernel = kernels.of(tokens)
            kernel.launch(batch, self._buffers)
            if not kernel.clears_empty_rows:
                clear_empty_rows(batch.out, batch.lse, batch.counts)
        return batch.out, batch.lse


def _register_indexer_kernels(vllm_config: Any) -> None:
    """Registers the kernels of vLLM's sparse indexer, as vLLM does for the backends it names."""
    if not vllm_config.kernel_config.enable_jit_warmup:
        return
    from vllm.v1.attention.backends.mla import compressor_utils, indexer

    compressor_utils._COMPRESSED_SLOT_MAPPING_KERNEL.register_warmup()
    indexer._PREPARE_UNIFORM_DECODE_KERNEL.register_warmup()
    indexer._BUILD_PREFILL_CHUNK_METADATA_KERNEL.register_warmup()


@dataclass
class DcpFlashAttnMLASparseMetadata(FlashAttnMLASparseMetadata, GatherFields, WideFields):
    """Stock's metadata, what prefill rows gather under PCP, and what is widened."""


class DcpFlashAttnMLASparseBuilder(
    WideKeysBuilderMixin, GatherBuilderMixin, FlashAttnMLASparseMetadataBuilder
):
    """Metadata of FLASH_ATTN_MLA_SPARSE."""

    metadata_cls = DcpFlashAttnMLASparseMetadata

    def _init_reorder_batch_threshold(
        self,
        reorder_batch_threshold: int | None = 1,
        supports_spec_as_decode: bool = False,
        supports_dcp_with_varlen: bool = False,
    ) -> None:
        # Stock's class does not say that its decodes may have several tokens under DCP; MTP's
        # verification would run as prefill.
        super()._init_reorder_batch_threshold(
            reorder_batch_threshold, supports_spec_as_decode, supports_dcp_with_varlen=True
        )


class DcpFlashAttnMLASparseBackend(CapabilityTableMixin, FlashAttnMLASparseBackend):
    """FLASH_ATTN_MLA_SPARSE on SM90 under DCP."""

    stock_refuses_dcp = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [*("auto", "bfloat16", "fp8", "fp8_e4m3")]

    @staticmethod
    def get_impl_cls() -> type[DcpFlashAttnMLASparseImpl]:
        """The implementation vLLM builds for each layer."""
        return DcpFlashAttnMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type[DcpFlashAttnMLASparseBuilder]:
        """The builder vLLM makes for each group of layers."""
        return DcpFlashAttnMLASparseBuilder
