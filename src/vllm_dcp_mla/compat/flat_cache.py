"""Patch: the kernel that turns positions into cache rows is warmed up for FLASH_ATTN_MLA_SPARSE.

Symptom: the first step of an engine compiles ``ConvertReqIndexToGlobalIndexKernel``, each rank by
itself, and ``jit_monitor_mode=error`` stops the engine.
Cause: ``MLAAttention._uses_flat_kv_cache`` names the backends whose warm-up it registers once the
cache's strides are known; of Hopper's it names FlashMLA alone.
Guard: wraps the method once; only layers with this package's class for Hopper differ.
Goes away when: vLLM names that backend too, or asks the backend.
"""

from __future__ import annotations

import functools
from typing import Any

_MARK = "_dcp_mla_knows_hopper"


def install(backend: type) -> None:
    """Wraps ``MLAAttention._uses_flat_kv_cache``; calling it again changes nothing.

    Args:
        backend: the class whose layers read their cache as flat rows.
    """
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    stock = MLAAttention._uses_flat_kv_cache
    if hasattr(stock, _MARK):
        return

    @functools.wraps(stock)
    def uses_flat_kv_cache(self: Any) -> bool:
        return issubclass(self.attn_backend, backend) or bool(stock(self))

    setattr(uses_flat_kv_cache, _MARK, True)
    MLAAttention._uses_flat_kv_cache = uses_flat_kv_cache
