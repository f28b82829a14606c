"""Hooks into vLLM 0.30, 0.31 and 0.32."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.warmup.jit_warmup import kernel_launcher
from vllm.model_executor.warmup.jit_warmup_triton_helper import (
    TritonWarmupTensor,
    VllmTritonJitKernel,
)
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder

__all__ = [
    "ABSENT_CHUNK_FIELDS",
    "IndexerHook",
    "KernelHook",
    "TritonJitKernel",
    "TritonWarmupTensor",
    "install_indexer_hooks",
    "kernel_launcher",
]

ABSENT_CHUNK_FIELDS = frozenset({"max_seqlen_k"})
TritonJitKernel = VllmTritonJitKernel


class KernelHook:
    """The kernel is a method of its own; the layer comes with a call before it."""

    _attend: Any
    _layer: Any

    def _prepare_mqa_kernel(self, layer: Any, device: torch.device) -> None:
        # Stock makes its workspace here.
        self._layer = layer

    def _run_mqa_kernel(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # 0.32 hands over the cache in pages smaller than a block where blocks are apart.
        result: tuple[torch.Tensor, torch.Tensor | None] = self._attend(
            q, kv_cache, topk_indices, seq_lens, self._layer, kv_cache.shape[1]
        )
        return result


class IndexerHook:
    """The splitting of prefills is a method."""

    serves_dcp: bool
    use_pcp: bool
    split_prefills: Any

    def _split_indexer_prefill_chunks(self, *args: Any, **kwargs: Any) -> list[tuple[slice, slice]]:
        stock = DeepseekV32IndexerMetadataBuilder._split_indexer_prefill_chunks
        # With PCP the rows of a chunk see all keys, and exchange no candidates.
        split = self.split_prefills if self.serves_dcp and not self.use_pcp else _stock_alone
        chunks: list[tuple[slice, slice]] = split(stock, *args, **kwargs)
        return chunks


def _stock_alone(stock: Any, *args: Any, **kwargs: Any) -> Any:
    return stock(*args, **kwargs)


def install_indexer_hooks(indexer: Any) -> None:
    """Subclasses reach everything here."""
