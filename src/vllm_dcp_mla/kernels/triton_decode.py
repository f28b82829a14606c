"""Sparse MLA attention in Triton, for any number of heads, from a bf16 or fp8_e4m3 cache.

One thread block attends some heads of one token over a share of its keys, so that a row of the
cache is read once for all of them. Where a batch is too small to fill the GPU, the keys of a token
are split. Their parts are merged by a second kernel, or by the thread block of those heads that
comes last; how work is cut is :mod:`..key_splits`' to say.

fp8 keys are exact in float16, which also holds the softmax' weights better than bf16 does. Their
scale is left out of the products and put into the softmax' scale and the result. Queries are
divided by 16 for it, without loss: they would have to be above a million to overflow.

Nothing that varies at run time is compiled for: one variant per cache dtype, head dims and tiling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.model_executor.warmup.jit_warmup import kernel_launcher
from vllm.model_executor.warmup.jit_warmup_triton_helper import (
    TritonWarmupTensor,
    VllmTritonJitKernel,
)

from ..key_splits import MAX_SPLITS, Tiling, head_blocks, num_splits, tiling_for
from ..merge import LseBase
from ..settings import KernelName
from .base import LaunchBuffers, LaunchShape, MlaDims, SparseMlaBatch, refuse_unaligned
from .merge_parts import MERGE_KERNEL
from .triton_bodies import ATTEND_INTEGERS, ATTEND_POINTERS, attend_kernel

_QUERY_UNIT = 1 / 16  # of an fp8 cache's queries in float16
_MERGED_DIMS = 128  # of all heads of a block at a time, by its last thread block
_DTYPES = (torch.bfloat16, torch.float8_e4m3fn)


class _AttendKernel(VllmTritonJitKernel["_AttendKernel.CompileKey"]):
    """The first kernel as vLLM warms it."""

    kernel = attend_kernel
    bind_launch_inputs = False

    @dataclass(frozen=True)
    class CompileKey:
        """What a variant is compiled for."""

        cache_dtype: torch.dtype
        latent_dim: int
        rotary_dim: int
        tiling: Tiling

    def get_warmup_keys(
        self, cache_dtype: torch.dtype, dims: MlaDims, tilings: Iterable[Tiling]
    ) -> list[CompileKey]:
        """All variants of a layer: one a tiling."""
        latent, rotary = dims.kv_lora_rank, dims.qk_rope_head_dim
        # The parts of a row and the blocks of an SM are not compiled for.
        cut = (replace(t, blocks_per_sm=1, splits=1) for t in tilings)
        return [self.CompileKey(cache_dtype, latent, rotary, t) for t in dict.fromkeys(cut)]

    def warmup_inputs(self, compile_key: CompileKey) -> dict[str, Any]:
        """Any inputs: nothing of them but the cache's dtype is part of the key."""
        dtypes = {
            **dict.fromkeys(("query_ptr", "out_ptr"), torch.bfloat16),
            **dict.fromkeys(("topk_ptr", "counts_ptr", "arrivals_ptr"), torch.int32),
            "cache_ptr": compile_key.cache_dtype,
        }
        return {
            **{p: TritonWarmupTensor(dtypes.get(p, torch.float32)) for p in ATTEND_POINTERS},
            **dict.fromkeys(ATTEND_INTEGERS, 2),
            **dict.fromkeys(("score_scale", "value_scale"), 0.5),
            "latent_dim": compile_key.latent_dim,
            "rotary_dim": compile_key.rotary_dim,
            "tiling": compile_key.tiling,
            "num_blocks": 1,
        }

    @kernel_launcher  # type: ignore[untyped-decorator]
    def __call__(
        self,
        *,
        latent_dim: int,
        rotary_dim: int,
        tiling: Tiling,
        num_blocks: int,
        **arguments: Any,
    ) -> Any:
        return (num_blocks,), {
            **arguments,
            "LATENT": latent_dim,
            "ROTARY": rotary_dim,
            "QUERY_UNIT": _QUERY_UNIT,
            "BLOCK_H": tiling.heads,
            "BLOCK_N": tiling.keys,
            "MERGES": tiling.merges_in_launch,
            "MERGED_DIMS": min(_MERGED_DIMS, latent_dim),
            "MAX_S": MAX_SPLITS,
            "num_warps": tiling.warps,
            "num_stages": tiling.stages,
        }


ATTEND_KERNEL = _AttendKernel()


def warm_up(
    cache_dtype: torch.dtype,
    dims: MlaDims,
    tilings: Iterable[Tiling],
    warm: Callable[..., None],
) -> None:
    """Has every variant compiled that a layer launches.

    Args:
        cache_dtype: of the cache's rows.
        dims: the model's MLA dims.
        tilings: those of the layer's launches, see :func:`..key_splits.tilings_of`.
        warm: called with a kernel and the arguments of its warm-up.
    """
    tilings = tuple(tilings)
    warm(ATTEND_KERNEL, cache_dtype, dims, tilings)
    for keys in dict.fromkeys(t.keys for t in tilings if not t.merges_in_launch):
        warm(MERGE_KERNEL, dims, torch.float32, keys)


class TritonDecodeKernel:
    """The two kernels behind the seam.

    Args:
        num_sms: multiprocessors of the GPU.
        rows: keys that a token is expected to have here; None for all of its top-k.
        tiling: of every launch; None to choose by shape.
    """

    name: ClassVar[KernelName] = "triton_decode"
    lse_base: ClassVar[LseBase] = "e"
    clears_empty_rows: ClassVar[bool] = True

    def __init__(self, num_sms: int, rows: int | None = None, tiling: Tiling | None = None) -> None:
        self._num_sms = num_sms
        self._rows = rows
        self._tiling = tiling

    def supports(self, shape: LaunchShape) -> str | None:
        """See :class:`.base.SparseMlaKernel`."""
        if shape.cache_dtype not in _DTYPES:
            return f"it reads a bf16 or float8_e4m3fn cache, got {shape.cache_dtype}"
        if shape.dims.kv_lora_rank != 512 or shape.dims.qk_rope_head_dim not in (0, 64):
            return f"it takes 512 latent and 64 or no rotary dims, got {shape.dims}"
        return None

    def launch(self, batch: SparseMlaBatch, buffers: LaunchBuffers) -> None:
        """See :class:`.base.SparseMlaKernel`; rows without tokens are written as (0, -inf).

        The query is bf16 whatever the cache is. ``buffers.workspace`` holds
        :func:`..key_splits.partial_bytes` bytes, ``buffers.counters``
        :func:`..key_splits.arrival_bytes`.

        Raises:
            ValueError: memory that is not aligned, or a query that is not bf16.
        """
        refuse_unaligned(batch)
        tokens, heads, _ = batch.query.shape
        latent = batch.dims.kv_lora_rank
        width = batch.topk.shape[1]
        tiling = self._tiling or tiling_for(tokens, heads, self._rows or width)
        splits = num_splits(tokens, heads, width, self._num_sms, tiling)
        rows = tokens * splits * heads
        partials = buffers.workspace.view(torch.float32)
        lse = batch.lse
        if lse is None:
            lse = torch.empty(tokens, heads, dtype=torch.float32, device=batch.query.device)
        unit = _QUERY_UNIT if batch.cache_rows.dtype == torch.float8_e4m3fn else 1.0
        scale = batch.softmax_scale * batch.query_scale * batch.cache_scale / unit
        shared = {
            "partial_out_ptr": partials,
            "partial_lse_ptr": partials[rows * latent :] if splits > 1 else partials,
            "counts_ptr": batch.counts,
            "out_ptr": batch.out,
            "lse_ptr": lse,
            "out_token": batch.out.stride(0),
            "out_head": batch.out.stride(1),
            "lse_token": lse.stride(0),
            "heads": heads,
            "splits": splits,
            "latent_dim": latent,
        }
        blocks = head_blocks(heads, tiling.heads)
        ATTEND_KERNEL(
            **shared,
            query_ptr=batch.query,
            cache_ptr=batch.cache_rows,
            topk_ptr=batch.topk,
            arrivals_ptr=buffers.counters.view(torch.int32),
            query_token=batch.query.stride(0),
            query_head=batch.query.stride(1),
            cache_row=batch.cache_rows.stride(0),
            topk_token=batch.topk.stride(0),
            head_blocks=blocks,
            score_scale=scale / math.log(2.0),
            value_scale=batch.cache_scale,
            rotary_dim=batch.dims.qk_rope_head_dim,
            tiling=tiling,
            num_blocks=tokens * splits * blocks,
        )
        if splits > 1 and not tiling.merges_in_launch:
            MERGE_KERNEL(**shared, block_keys=tiling.keys, num_blocks=tokens * heads)
