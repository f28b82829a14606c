"""SM90, with vLLM 0.33: FLASH_ATTN_MLA_SPARSE, the first sparse backend that vLLM asks there.

Stock has no backend that serves DCP from a bf16 or fp8_e4m3 cache on Hopper. This one reads the
query packed and in bf16, and dequantises a cache in the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.sparse_mla_attention import SparseMLACommonImpl
from vllm.v1.attention.backends.mla.flashattn_mla_sparse import (
    FlashAttnMLASparseBackend,
    FlashAttnMLASparseMetadata,
    FlashAttnMLASparseMetadataBuilder,
)
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from .. import device_buffer
from ..compat import flat_cache, sleep
from ..kernel_choice import kernels_by_tokens
from ..kernels import finish, load_kernel, spread, triton_decode
from ..kernels.base import LaunchShape, MlaDims, SparseMlaKernel
from ..kernels.split import clear_empty_rows
from ..key_splits import ANY, tilings_of
from ..settings import KernelChoice, KernelName, load_settings
from ..warmup import warm
from .batches import packed, sparse_batch
from .implementation import DcpImplMixin
from .pcp import GatherBuilderMixin, GatherFields, PcpGatherMixin
from .refusing import CapabilityTableMixin

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionLayer

logger = init_logger("vllm.dcp_mla.hopper")

#: Kernels of libraries that vLLM ships, which serve some launches better than ours.
_SHIPPED: tuple[KernelName, ...] = ("flashmla", "flash_attn3")


class DcpFlashAttnMLASparseImpl(
    PcpGatherMixin, DcpImplMixin, SparseMLACommonImpl[FlashAttnMLASparseMetadata]
):
    """A kernel that splits keys for small steps, others that take the shape for larger ones."""

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
        self._shape = LaunchShape(
            heads=heads,
            topk=config.model_config.hf_text_config.index_topk,
            cache_dtype=torch.float8_e4m3fn if self._is_quantized else torch.bfloat16,
            dims=MlaDims(self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim),
        )
        device = device_buffer.kernel_device()
        self._num_sms = device_buffer.num_sms(device)
        self._forced = load_settings(config.additional_config).kernel
        # Keys of a token that this rank holds, about.
        self._rows = self._shape.topk // config.parallel_config.decode_context_parallel_size
        self._kernels = {heads: self._choose_kernels(heads)}
        self.kernel_names = self._kernels[heads].names
        tilings = {t: None for n in (heads, self.num_heads) for t in tilings_of(n, self._rows)}
        self._buffers = device_buffer.acquire_partials(
            device, self.kv_lora_rank, self.qk_rope_head_dim
        )
        compiled = partial(warm, config, device)
        triton_decode.warm_up(self._shape.cache_dtype, self._shape.dims, tilings, compiled)
        if not self._is_quantized:  # a bf16 cache is what the shipped kernels take
            finish.warm_up(self._shape.dims, compiled)
            if self.qk_rope_head_dim:  # FlashMLA takes no model without
                spread.warm_up(self._shape.dims, compiled)
        sleep.install()
        _register_indexer_kernels(config)
        flat_cache.install(DcpFlashAttnMLASparseBackend)
        self._init_gather()
        self._join_ranks(config, heads=heads, gather_rows=self.gather_rows)

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
            ``out [T, H, kv_lora_rank]`` bf16 and, where wanted, ``lse [T, H]`` float32, natural.
        """
        query = packed(q)
        batch = sparse_batch(
            query,
            kv_cache.view(self._shape.cache_dtype),
            topk_indices,
            counts,
            block_size=block_size,
            softmax_scale=self.scale,
            query_scale=1.0,
            # A checkpoint may hold scales that a bf16 cache was never quantised with.
            cache_scale=layer._k_scale_float if self._is_quantized else 1.0,
            dims=self._shape.dims,
            with_lse=with_lse and self.need_to_return_lse_for_decode,
            out=out,
        )
        tokens, heads, _ = query.shape
        if heads not in self._kernels:  # prefill rows under PCP have this rank's heads only
            self._kernels[heads] = self._choose_kernels(heads)
        if tokens:
            kernel = self._kernels[heads].of(tokens)
            kernel.launch(batch, self._buffers)
            if not kernel.clears_empty_rows:
                clear_empty_rows(batch.out, batch.lse, batch.counts)
        return batch.out, batch.lse

    def _choose_kernels(self, heads: int) -> Kernels:
        """The kernels of launches of a number of heads."""
        shape = replace(self._shape, heads=heads)
        return choose_kernels(shape, self._forced, self._num_sms, self._rows)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The most tokens of a launch that a kernel is for, rising, and the kernel."""

    by_tokens: tuple[tuple[int, SparseMlaKernel], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of all, each once."""
        return tuple(dict.fromkeys(kernel.name for _, kernel in self.by_tokens))

    def of(self, tokens: int) -> SparseMlaKernel:
        """The kernel of a launch of so many tokens."""
        return next(kernel for most, kernel in self.by_tokens if tokens <= most)


def choose_kernels(shape: LaunchShape, forced: KernelChoice, num_sms: int, rows: int) -> Kernels:
    """The kernels of launches of a shape.

    Args:
        shape: of the launches.
        forced: the only kernel to use, or ``auto``.
        num_sms: multiprocessors.
        rows: keys that a token is expected to have here.

    Raises:
        ValueError: the forced kernel does not take the shape.
    """
    if forced != "auto":
        kernel = load_kernel(forced, num_sms=num_sms, rows=rows)
        if (reason := kernel.supports(shape)) is not None:
            raise ValueError(f"The forced kernel {forced} does not serve this model: {reason}.")
        return Kernels(((ANY, kernel),))
    found = {"triton_decode": load_kernel("triton_decode", num_sms=num_sms, rows=rows)}
    for name in _SHIPPED:
        try:
            kernel = load_kernel(name, num_sms=num_sms, rows=rows)
        except ImportError as error:
            logger.info_once("Not used: %s", str(error))
            continue
        if kernel.supports(shape) is None:
            found[name] = kernel
    chosen = kernels_by_tokens(shape.heads, rows, found)
    return Kernels(tuple((tokens, found[name]) for tokens, name in chosen))


def _register_indexer_kernels(vllm_config: Any) -> None:
    """Registers the kernels of vLLM's sparse indexer, as vLLM does for the backends it names."""
    if not vllm_config.kernel_config.enable_jit_warmup:
        return
    from vllm.v1.attention.backends.mla import compressor_utils, indexer

    compressor_utils._COMPRESSED_SLOT_MAPPING_KERNEL.register_warmup()
    indexer._PREPARE_UNIFORM_DECODE_KERNEL.register_warmup()
    indexer._BUILD_PREFILL_CHUNK_METADATA_KERNEL.register_warmup()


@dataclass
class DcpFlashAttnMLASparseMetadata(FlashAttnMLASparseMetadata, GatherFields):
    """Stock's metadata, and what prefill rows gather under PCP."""


class DcpFlashAttnMLASparseBuilder(GatherBuilderMixin, FlashAttnMLASparseMetadataBuilder):
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
