"""Patch: under PCP with DCP ranks exchange cache rows and index keys as they are cached.

Symptom: from an fp8 cache, log-probabilities are 1.6 to 1.8 times as far from TP1's as TP2's are.
From a bf16 cache selections differ from TP1's by near-ties, since index keys are always fp8.
Cause: without PCP a fused kernel rounds both from float32 to fp8 and writes them. With PCP it
writes bf16, which ranks exchange and then round once more.
Guard: wraps ``DeepseekV32Attention.forward`` and two functions of its module. Layers with this
package's classes under PCP and DCP have the fused kernel write the bytes of their cache over the
bf16 tensors that are exchanged, which nothing else reads then: vLLM has no dense prefill there.
Only what that kernel was seen to write so is stored so: a layer with a forward of its own, or of
another engine of this process, goes on as on stock.
``VLLM_DCP_MLA_PCP_CACHED_ROWS=0`` leaves vLLM's exchange.
Goes away when: vLLM exchanges what the cache holds, or float32.
"""

from __future__ import annotations

import functools
import sys
from contextvars import ContextVar
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pcp_group
from vllm.forward_context import get_forward_context
from vllm.v1.attention.ops.pcp import maybe_gather_indexer_k
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from ..kernels.store_rows import STORE_ROWS_KERNEL, store_rows
from ..warmup import warm

_MODULE = "vllm.models.deepseek_v32.attention"
_MARK = "_dcp_mla_exchanges_cached_rows"
#: Bytes of an index key's scale; its values are of one byte.
_SCALE_BYTES = 4

#: The layer whose forward runs, where it exchanges cached rows.
_layer: ContextVar[Any] = ContextVar("layer", default=None)
#: Of an index cache's module, once keys are exchanged so. Replayed graphs run no forward that could
#: say so, and names are those of every engine.
_KEYS_MARK = "dcp_mla_gets_cached_keys"


class CachedRowsMixin:
    """Before an implementation of vLLM."""

    #: Whether ranks are to exchange rows and index keys as they are cached.
    exchanges_cached_rows = False
    #: Whether the fused kernel writes this layer's rows so.
    gets_cached_rows = False

    def _exchange_cached_rows(self: Any, config: Any, device: torch.device) -> None:
        """Has this layer do so, where the model is one that can; while the model loads."""
        if not install():
            return
        self.exchanges_cached_rows = True
        index_head_dim = config.model_config.hf_text_config.index_head_dim
        warm(config, device, STORE_ROWS_KERNEL, index_head_dim, _SCALE_BYTES)
        if _holds_bytes(self.kv_cache_dtype):
            warm(config, device, STORE_ROWS_KERNEL, self.head_size, 0)

    def do_kv_cache_update(
        self: Any,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Stores rows; those that the fused kernel wrote as they are cached, as they came."""
        if self.gets_cached_rows:
            if kv_cache.numel():
                store_rows(kv_c_normed, kv_cache, slot_mapping.flatten())
            return
        super().do_kv_cache_update(  # type: ignore[misc]
            kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, *args, **kwargs
        )


def _holds_bytes(kv_cache_dtype: str) -> bool:
    """Whether a cache row is one byte a value."""
    return is_quantized_kv_cache(kv_cache_dtype) and not kv_cache_dtype.endswith("_ds_mla")


def install() -> bool:
    """Wraps the model's functions; calling it again changes nothing.

    Returns:
        Whether the process has imported the model; nothing is wrapped otherwise.
    """
    module: Any = sys.modules.get(_MODULE)
    if module is None:
        return False
    attention = module.DeepseekV32Attention
    if not hasattr(attention.forward, _MARK):
        attention.forward = _noting(attention.forward)
        module.fused_norm_rope = _rounding_once(module.fused_norm_rope)
        module.sparse_attn_indexer = _storing(module.sparse_attn_indexer)
    return True


def _noting(stock: Any) -> Any:
    """Stock's forward of a layer; what it calls can see the layer."""

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self.impl, "exchanges_cached_rows", False):
            return stock(self, *args, **kwargs)
        token = _layer.set(self)
        try:
            return stock(self, *args, **kwargs)
        finally:
            _layer.reset(token)

    setattr(forward, _MARK, True)
    return forward


def _rounding_once(stock: Any) -> Any:
    """Stock's fused kernel; it writes what is cached where it would write bf16."""

    @functools.wraps(stock)
    def fused_norm_rope(positions: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        layer = _layer.get()
        if layer is None:
            return stock(positions, *args, **kwargs)
        written: dict[str, Any] = {}
        if _holds_bytes(layer.kv_cache_dtype):
            width = layer.kv_lora_rank + layer.qk_rope_head_dim
            written |= {
                "mla_kv_cache": _as_cache(kwargs["kv_c_out"], width),
                "mla_k_scale": layer._k_scale,
                "kv_c_out": None,
                "k_pe_out": None,
            }
            layer.impl.gets_cached_rows = True
        if (keys := kwargs.get("index_k_out")) is not None:
            written |= {
                "indexer_k_cache": _as_cache(keys, keys.shape[1] + _SCALE_BYTES),
                "index_k_out": None,
            }
            setattr(layer.indexer.k_cache, _KEYS_MARK, True)
        if written:
            own = torch.arange(len(positions), device=positions.device)
            written |= {"slot_mapping": own, "indexer_slot_mapping": own}
        return stock(positions, *args, **{**kwargs, **written})

    return fused_norm_rope


def _as_cache(rows: torch.Tensor, width: int) -> torch.Tensor:
    """``[T, N]`` of two bytes as a cache of blocks of one row: ``[T, 1, width]`` bytes."""
    return rows.view(torch.uint8)[:, None, :width]


def _storing(stock: Any) -> Any:
    """Stock's indexer; it finds the keys in its cache already."""

    @functools.wraps(stock)
    def sparse_attn_indexer(
        hidden_states: torch.Tensor,
        k_cache_prefix: str,
        kv_cache: torch.Tensor,
        q_quant: torch.Tensor,
        q_scale: torch.Tensor | None,
        k: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        context = get_forward_context()
        metadata = context.attn_metadata
        marked = getattr(context.no_compile_layers.get(k_cache_prefix), _KEYS_MARK, False)
        if marked and isinstance(metadata, dict) and k is not None:
            _store_keys(metadata[k_cache_prefix], k, kv_cache, kwargs)
            kwargs["skip_k_cache_insert"] = True
        return stock(hidden_states, k_cache_prefix, kv_cache, q_quant, q_scale, k, *args, **kwargs)

    return sparse_attn_indexer


def _store_keys(
    metadata: Any, keys: torch.Tensor, cache: torch.Tensor, options: dict[str, Any]
) -> None:
    """Exchanges index keys as stock does, and stores them as they are."""
    slots = metadata.slot_mapping
    tokens = slots.shape[0]
    if tokens > len(keys):  # those of all PCP ranks
        tokens //= get_pcp_group().world_size
    keys, slots = maybe_gather_indexer_k(
        keys[:tokens],
        slots,
        metadata.num_decode_tokens,
        True,
        pcp_shard_decode_requests=options["pcp_shard_decode_requests"],
    )
    store_rows(keys, cache, slots, scale_bytes=_SCALE_BYTES)
