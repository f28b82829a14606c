"""Prefill from an fp8 cache on Hopper: its keys are widened to bf16 once a layer.

The libraries' kernels read bf16 only, and from a few hundred tokens on they take half the time of
ours. What they read is a copy of the requests' rows, or of those that PCP has gathered.
:mod:`.wide_metadata` says which requests, and where the copy lies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backends.mla.sparse_utils import flat_kv_row_view

from ..gather_plan import PAGE_ROWS
from ..kernel_choice import widens
from ..kernels.widen import remap, widen

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionLayer

    from .gather_metadata import GatheredChunk
    from .wide_metadata import WideChunk, WideStep


class WideKeysMixin:
    """Before an implementation of vLLM, and before :class:`.gather.PcpGatherMixin`.

    ``_attend(q, kv_cache, topk, counts, layer, block_size, *, out) -> (out, lse)`` takes keys of
    bf16, too; ``_shape`` is the :class:`..kernels.base.LaunchShape` of the cache's.
    """

    #: Whether kernels that read bf16 are there for long prefills from an fp8 cache.
    widens_keys = False
    _wide: WideStep | None = None

    def forward_mqa(
        self: Any,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Stock's; what it calls can see what is widened."""
        self._wide = attn_metadata.wide
        try:
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)  # type: ignore[misc]
        finally:
            self._wide = None

    def _attend_widened(
        self: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        topk: torch.Tensor,
        counts: torch.Tensor,
        layer: AttentionLayer,
        block_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attends T tokens, those of the step's chunks from widened keys.

        The arguments are those of ``_attend``, with a packed query; ``topk`` is written to, which
        stock makes anew for every layer.
        """
        tokens, heads, _ = query.shape
        shape = (tokens, heads, self._shape.dims.kv_lora_rank)
        out = torch.empty(shape, dtype=torch.bfloat16, device=query.device)
        lse = torch.empty(tokens, heads, dtype=torch.float32, device=query.device)

        def attend(some: slice, keys: torch.Tensor, rows: int) -> None:
            _, lse[some] = self._attend(
                query[some], keys, topk[some], counts[some], layer, rows, out=out[some]
            )

        done = 0
        for chunk in self._wide.chunks:
            if done < chunk.tokens.start:
                attend(slice(done, chunk.tokens.start), kv_cache, block_size)
            self._widen_blocks(chunk, kv_cache, topk, counts, layer, block_size)
            attend(chunk.tokens, self._wide.memory, PAGE_ROWS)
            done = chunk.tokens.stop
        if done < tokens:
            attend(slice(done, tokens), kv_cache, block_size)
        return out, lse

    def _widen_blocks(
        self: Any,
        chunk: WideChunk,
        kv_cache: torch.Tensor,
        topk: torch.Tensor,
        counts: torch.Tensor,
        layer: AttentionLayer,
        block_size: int,
    ) -> None:
        """Copies a chunk's rows; its rows of ``topk`` become those of the copy."""
        step: WideStep = self._wide
        _, block_rows = flat_kv_row_view(kv_cache, block_size)
        moved = step.moved(len(kv_cache))
        widen(
            kv_cache.view(self._shape.cache_dtype),
            chunk.table,
            chunk.owners,
            chunk.firsts,
            layer._k_scale_float,
            self._shape.dims,
            wide=step.memory,
            moved=moved,
        )
        remap(
            topk[chunk.tokens],
            counts[chunk.tokens],
            moved,
            block_rows=block_rows,
            block_size=block_size,
        )

    def _readable(
        self: Any, keys: torch.Tensor, chunk: GatheredChunk, layer: AttentionLayer
    ) -> torch.Tensor:
        """Gathered keys, of bf16 where that pays.

        A request that is cut into ranges is left alone: its later ones are launched for any number
        of tokens, and kernels of bf16 keys are warmed for many.
        """
        step: WideStep | None = self._wide
        count = chunk.plan.rows_per_rank * self.dcp_world_size
        tokens = chunk.tokens.stop - chunk.tokens.start
        if (
            step is None
            or not chunk.plan.whole
            or count > step.memory.shape[0] * PAGE_ROWS
            or not widens(tokens, tokens * min(self._shape.topk, count), count)
        ):
            return keys
        assert step.one_block is not None
        widen(
            keys.view(-1, self.head_size)[:count].unsqueeze(0),
            step.one_block[:, None],
            step.one_block,
            step.one_block,
            layer._k_scale_float,
            self._shape.dims,
            wide=step.memory,
            moved=step.moved(1),
        )
        return step.memory
