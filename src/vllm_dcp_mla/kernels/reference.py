"""trtllm-gen's contract in plain torch: the same inputs refused, the same memory left alone.

Slow, exact to float32, on any device.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from ..capability_rules import trtllm_gen_heads
from ..merge import LseBase
from ..settings import KernelName
from ..workspace import counter_bytes, softmax_stats_bytes
from .base import LaunchBuffers, LaunchShape, SparseMlaBatch

_ALIGNMENT = 16
_GATHER_ELEMENTS = 1 << 24  # float32 elements gathered from the cache at a time


class ReferenceKernel:
    """Sparse MLA attention with a base-2 LSE, as trtllm-gen's decode kernel does it."""

    name: ClassVar[KernelName] = "reference"
    lse_base: ClassVar[LseBase] = "2"
    clears_empty_rows: ClassVar[bool] = False

    def supports(self, shape: LaunchShape) -> str | None:
        """See :class:`.base.SparseMlaKernel`."""
        return trtllm_gen_heads(shape.heads)

    def launch(self, batch: SparseMlaBatch, buffers: LaunchBuffers) -> None:
        """See :class:`.base.SparseMlaKernel`.

        As the original: ``out`` of a row without tokens is left unwritten and its LSE is -inf.

        Raises:
            ValueError: query and cache dtypes differ, a head count between 64 and 128, pages of
                another size than 32 or 64 or that do not divide the cache, counters that are too
                small; on a CPU also a NoPE row without tokens or a row outside the cache.
            RuntimeError: the workspace does not hold the softmax statistics.
        """
        self._refuse(batch, buffers)
        if batch.lse is not None:
            stats = self._carve_stats(batch, buffers.workspace)
        rows_per_step = max(1, _GATHER_ELEMENTS // (batch.topk.shape[1] * batch.query.shape[2]))
        for start in range(0, batch.query.shape[0], rows_per_step):
            part = batch.tokens(slice(start, start + rows_per_step))
            maxima, sums = self._attend(part)
            if batch.lse is not None:
                stats[start : start + rows_per_step, :, 0] = maxima
                stats[start : start + rows_per_step, :, 1] = sums

    @staticmethod
    def _refuse(batch: SparseMlaBatch, buffers: LaunchBuffers) -> None:
        tokens, heads, _ = batch.query.shape
        if batch.query.dtype != batch.cache_rows.dtype:
            raise ValueError(
                f"query is {batch.query.dtype} and the cache {batch.cache_rows.dtype}; the kernel "
                "needs one dtype for both"
            )
        if (reason := trtllm_gen_heads(heads)) is not None:
            raise ValueError(reason)
        if batch.cache_rows.shape[0] % batch.page_size:
            raise ValueError(
                f"{batch.cache_rows.shape[0]} cache rows are not whole pages of {batch.page_size}"
            )
        if batch.page_size not in (32, 64):
            raise ValueError(f"pages of {batch.page_size} rows: the kernel reads pages of 32 or 64")
        if batch.query.device.type == "cpu":  # on a GPU, reading values would stall every layer
            ReferenceKernel._refuse_rows(batch)
        needed = counter_bytes(heads, tokens, num_sms=1)
        if buffers.counters.numel() < needed:
            raise ValueError(f"{buffers.counters.numel()} counter bytes, {needed} needed")

    @staticmethod
    def _refuse_rows(batch: SparseMlaBatch) -> None:
        if batch.dims.is_nope and bool((batch.counts < 1).any()):
            raise ValueError("a NoPE row must hold at least 1 token")
        valid = torch.arange(batch.topk.shape[1]) < batch.counts[:, None]
        rows = batch.topk[valid]
        outside = (rows < 0) | (rows >= batch.cache_rows.shape[0])
        if bool(outside.any()):
            raise ValueError(
                f"a valid top-k entry is {int(rows[outside][0])}, outside the cache's "
                f"{batch.cache_rows.shape[0]} rows"
            )

    @staticmethod
    def _carve_stats(batch: SparseMlaBatch, workspace: torch.Tensor) -> torch.Tensor:
        """Takes the slab off the workspace's front as the launcher's aligned allocator does."""
        tokens, heads, _ = batch.query.shape
        skipped = -workspace.data_ptr() % _ALIGNMENT
        available = workspace.numel() * workspace.element_size() - skipped
        needed = softmax_stats_bytes(heads, tokens)
        if needed > available:
            raise RuntimeError(
                f"softmax statistics of {tokens} tokens x {heads} heads need {needed} bytes of "
                f"workspace, {available} are there"
            )
        written = workspace.view(torch.uint8)[skipped : skipped + tokens * heads * 8]
        return written.view(torch.float32).view(tokens, heads, 2)

    @staticmethod
    def _attend(batch: SparseMlaBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Attends some tokens; returns the row maxima and sums ``[T, H]`` of the softmax."""
        width = batch.topk.shape[1]
        valid = torch.arange(width, device=batch.topk.device) < batch.counts[:, None]
        rows = torch.where(valid, batch.topk, 0).long()
        keys = batch.cache_rows[rows].float() * batch.cache_scale  # [T, K, D]
        # What lies behind a row's count must not reach the sums, whatever it is.
        keys = keys.masked_fill(~valid[:, :, None], 0.0)
        query = batch.query.float() * batch.query_scale
        scores = torch.einsum("thd,tkd->thk", query, keys) * batch.softmax_scale
        scores = scores.masked_fill(~valid[:, None, :], float("-inf"))
        held = (batch.counts > 0)[:, None]
        maxima = torch.where(held, scores.amax(dim=-1), 0.0)
        weights = torch.exp(scores - maxima[:, :, None])
        sums = weights.sum(dim=-1)
        values = keys[:, :, : batch.dims.kv_lora_rank]
        out = torch.einsum("thk,tkv->thv", weights / sums.clamp_min(1e-30)[:, :, None], values)
        batch.out.copy_(torch.where(held[:, :, None], out.to(batch.out.dtype), batch.out))
        if batch.lse is not None:
            batch.lse.copy_((maxima + torch.log(sums)) / math.log(2.0))
        return maxima, sums
