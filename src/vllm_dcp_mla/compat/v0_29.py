"""Hooks into vLLM 0.29, which lacks the fixes for DCP that came with 0.30."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from vllm.model_executor.warmup.jit_warmup import VllmJitKernel
from vllm.model_executor.warmup.jit_warmup_triton_helper import TritonWarmupTensor
from vllm.v1.attention.backends.mla.sparse_utils import (
    flat_kv_row_view,
    triton_convert_req_index_to_global_index,
    triton_filter_and_convert_dcp_index,
)

from ..indexer import scope

__all__ = [
    "ABSENT_CHUNK_FIELDS",
    "IndexerHook",
    "KernelHook",
    "TritonJitKernel",
    "TritonWarmupTensor",
    "install_indexer_hooks",
    "kernel_launcher",
]

ABSENT_CHUNK_FIELDS = frozenset({"max_seqlen_k", "pcp_deinterleave_idx"})


class KernelHook:
    """``forward_mqa`` is one piece, from the choice of keys to the kernel."""

    _attend: Any
    dcp_world_size: int
    dcp_rank: int
    topk_indices_buffer: torch.Tensor

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attends T tokens; see ``_attend``, and stock's for the arguments."""
        tokens = (q[0] if isinstance(q, tuple) else q).shape[0]
        topk = self.topk_indices_buffer[:tokens]
        block_size = attn_metadata.block_size
        _, block_stride = flat_kv_row_view(kv_c_and_k_pe_cache, block_size)
        common = {
            "BLOCK_SIZE": block_size,
            "BLOCK_STRIDE_ROWS": block_stride,
            "NUM_TOPK_TOKENS": topk.shape[1],
            "return_valid_counts": True,
        }
        where = attn_metadata.req_id_per_token[:tokens], attn_metadata.block_table, topk
        if self.dcp_world_size > 1:
            rows, counts = triton_filter_and_convert_dcp_index(
                *where,
                dcp_size=self.dcp_world_size,
                dcp_rank=self.dcp_rank,
                cp_kv_cache_interleave_size=attn_metadata.cp_kv_cache_interleave_size,
                **common,
            )
        else:
            rows, counts = triton_convert_req_index_to_global_index(*where, **common)
        result: tuple[torch.Tensor, torch.Tensor | None] = self._attend(
            q, kv_c_and_k_pe_cache, rows, counts, layer, block_size
        )
        return result


class IndexerHook:
    """What the builder overrides is all there is."""


def install_indexer_hooks(indexer: Any) -> None:
    """Patch: stock's ``build()`` splits prefills by a function of its module.

    Guard: the function does what it did unless one of our builds is running.
    """
    stock = indexer.split_indexer_prefill_chunks

    @functools.wraps(stock)
    def split_indexer_prefill_chunks(*args: Any, **kwargs: Any) -> Any:
        running = scope.running()
        if running is None:
            return stock(*args, **kwargs)
        return running.split_prefills(stock, *args, **kwargs)

    indexer.split_indexer_prefill_chunks = split_indexer_prefill_chunks


class TritonJitKernel(VllmJitKernel[Any]):
    """A kernel whose launch is described by ``__call__``, as releases from 0.30 on have it."""

    kernel: Any
    _compiling = False

    def warmup_inputs(self, compile_key: Any) -> dict[str, Any]:
        """Arguments of ``__call__`` that stand for a compile key."""
        raise NotImplementedError

    def compile(self, compile_key: Any) -> None:
        """Compiles one variant, into the cache that launches look it up in."""
        self._compiling = True
        try:
            self(**self.warmup_inputs(compile_key))
        finally:
            self._compiling = False

    def launch(self, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
        """Launches the kernel, or compiles it."""
        if self._compiling:
            self.kernel.warmup(grid=(1,), **arguments)
        else:
            self.kernel[grid](**arguments)


def kernel_launcher(call: Any) -> Any:
    """Launches the kernel with what a ``__call__`` was given, and the grid that it returns.

    An argument goes to the kernel's parameter of its name, or of its name and ``_ptr``; one that
    has none is the grid's own.
    """
    signature = inspect.signature(call)

    @functools.wraps(call)
    def launched(self: TritonJitKernel, *args: Any, **kwargs: Any) -> None:
        grid, constants = call(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments
        taken = {p: p.removesuffix("_ptr") for p in self.kernel.arg_names if p not in constants}
        arguments = {p: given[name] for p, name in taken.items()}
        self.launch(grid, {**arguments, **constants})

    return launched
