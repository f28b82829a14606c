"""Hooks into vLLM 0.33."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.warmup.jit_warmup import kernel_launcher
from vllm.model_executor.warmup.jit_warmup_triton_helper import (
    TritonWarmupTensor,
    VllmTritonJitKernel,
)

from .v0_30 import IndexerHook, install_indexer_hooks

__all__ = [
    "ABSENT_CHUNK_FIELDS",
    "IndexerHook",
    "KernelHook",
    "TritonJitKernel",
    "TritonWarmupTensor",
    "install_indexer_hooks",
    "kernel_launcher",
]

ABSENT_CHUNK_FIELDS: frozenset[str] = frozenset()
TritonJitKernel = VllmTritonJitKernel


class KernelHook:
    """The kernel is a method of its own, with the layer among its arguments."""

    _attend: Any

    def _forward_mqa_kernel(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        valid_counts: torch.Tensor,
        *,
        layer: Any,
        block_size: int,
        is_decode: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        result: tuple[torch.Tensor, torch.Tensor | None] = self._attend(
            q, kv_cache, topk_indices, valid_counts, layer, block_size
        )
        return result
