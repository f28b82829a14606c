"""PCP with DCP: prefill rows attend the whole context, whose keys are gathered for them.

Stock filters every row's keys to this rank's shard in ``forward_mqa``. That is right for decode
rows, which all ranks have and merge by LSE. A prefill row is on one rank only: the shards of its
request are gathered as raw cache rows, and no LSE leaves for it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import get_dcp_group, get_tp_group
from vllm.v1.attention.backends.mla.sparse_utils import (
    flat_kv_row_view,
    triton_convert_req_index_to_global_index,
)
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from .. import device_buffer
from ..gather_plan import PAGE_ROWS, GatherPlan
from ..settings import load_settings
from .batches import packed
from .cached_rows import CachedRowsMixin
from .gather_metadata import GatheredChunk, GatherStep

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionLayer

_WORD = torch.int64  # rows are moved as words of it


class PcpGatherMixin(CachedRowsMixin):
    """Before an implementation of vLLM, whose own ``_attend`` it calls for prefill rows.

    ``_attend(q, kv_cache, topk, counts, layer, block_size, *, out, with_lse) -> (out, lse)``.
    """

    #: None where PCP or DCP is off.
    gather_plan: GatherPlan | None = None

    @property
    def gather_rows(self) -> int:
        """Most cache rows that each rank sends at a time; 0 where PCP or DCP is off."""
        return self.gather_plan.rows_per_rank if self.gather_plan is not None else 0

    def _init_gather(self: Any) -> None:
        """Makes the workspace, while the model loads, where this engine gathers."""
        config = get_current_vllm_config()
        parallel = config.parallel_config
        dcp = parallel.decode_context_parallel_size
        if parallel.prefill_context_parallel_size == 1 or dcp == 1:
            return
        scheduler = config.scheduler_config
        self._cache_dtype = (
            torch.float8_e4m3fn if is_quantized_kv_cache(self.kv_cache_dtype) else torch.bfloat16
        )
        settings, device = load_settings(config.additional_config), device_buffer.kernel_device()
        if settings.pcp_cached_rows:
            self._exchange_cached_rows(config, device)
        self._acquire_gather = functools.partial(
            device_buffer.acquire_gather,
            device,
            limit_bytes=settings.gather_limit_bytes,
            row_bytes=self.head_size * self._cache_dtype.itemsize,
            dcp=dcp,
            max_model_len=config.model_config.max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_tokens=scheduler.max_num_batched_tokens,
            heads=self.num_heads,
            latent_dim=self.kv_lora_rank,
        )
        self.plan_gather(parallel.cp_kv_cache_interleave_size)

    def plan_gather(self: Any, interleave: int) -> None:
        """Plans the workspace, which the first plan makes, for an interleave.

        Args:
            interleave: tokens a rank stores before the next takes over.

        Raises:
            ValueError: not one turn of the interleave fits; the message names the bytes needed.
        """
        self._workspace, self.gather_plan = self._acquire_gather(interleave=interleave)

    def forward_mqa(
        self: Any,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attends T tokens, D of them decodes, which come first.

        Args:
            q: ``[T, H, D]`` or its two parts. Where DCP spans TP, heads are those of all TP ranks.
            kv_c_and_k_pe_cache: ``[blocks, block_size, D]``.
            attn_metadata: vLLM's, with :class:`.gather_metadata.GatherFields`.
            layer: holds the checkpoint's scales.

        Returns:
            ``out [T, H, kv_lora_rank]`` and ``lse [D, H]``. Decode rows are attention over this
            rank's shard. Prefill rows are final, in this rank's own heads; the others' are
            undefined, and vLLM drops them.
        """
        step: GatherStep | None = attn_metadata.gather
        if step is None:
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)  # type: ignore[misc]
        query = packed(q)
        tokens, heads, _ = query.shape
        decodes = attn_metadata.num_decode_tokens
        shape = (tokens, heads, self.kv_lora_rank)
        out = torch.empty(shape, dtype=torch.bfloat16, device=query.device)
        lse = torch.empty(0, heads, dtype=torch.float32, device=query.device)
        if decodes:
            out[:decodes], lse = super().forward_mqa(  # type: ignore[misc]
                query[:decodes], kv_c_and_k_pe_cache, attn_metadata, layer
            )
        if heads == self.num_heads:
            self._attend_gathered(query, out, kv_c_and_k_pe_cache, attn_metadata, layer)
        else:
            first = get_tp_group().rank_in_group * self.num_heads
            mine = slice(first, first + self.num_heads)
            own = torch.empty_like(out[:, mine])
            self._attend_gathered(
                query[:, mine].contiguous(), own, kv_c_and_k_pe_cache, attn_metadata, layer
            )
            out[decodes:, mine] = own[decodes:]
        return out, lse

    def _attend_gathered(
        self: Any,
        query: torch.Tensor,
        out: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        layer: AttentionLayer,
    ) -> None:
        """Writes the prefill rows of ``out [T, num_heads, kv_lora_rank]``."""
        rows, block_stride = flat_kv_row_view(kv_cache, metadata.block_size)
        step: GatherStep = metadata.gather
        sent = step.cache_rows(metadata.block_table, metadata.block_size, block_stride)
        lse = None
        for chunk in step.chunks:
            keys = self._gather(chunk, rows.view(_WORD), sent)
            # Every rank gathers every chunk, also one that holds none of its rows.
            if chunk.tokens.start == chunk.tokens.stop:
                continue
            keys = self._readable(keys, chunk, layer)
            topk, counts = self._locate(chunk, metadata, block_stride)
            part = GatheredPart(query[chunk.tokens], keys, topk, counts, out[chunk.tokens])
            if chunk.plan.whole:
                self._attend_range(part, layer, with_lse=False)
            elif chunk.plan.start == 0:
                lse = self._attend_range(part, layer, with_lse=True)
            else:
                self._merge_range(part, lse, layer)

    def _gather(
        self: Any, chunk: GatheredChunk, rows: torch.Tensor, sent: torch.Tensor
    ) -> torch.Tensor:
        """Gathers a chunk's rows of all ranks; returns all of the workspace, as cache blocks."""
        count = chunk.plan.rows_per_rank
        keys = self._workspace[: self.gather_plan.key_bytes].view(self._cache_dtype)
        keys = keys.view(-1, PAGE_ROWS, self.head_size)
        gathered = keys.view(-1, self.head_size).view(_WORD)[: count * self.dcp_world_size]
        own = gathered[count * self.dcp_rank :][:count]
        torch.index_select(rows, 0, sent[chunk.rows], out=own)
        torch.distributed.all_gather_into_tensor(gathered, own, group=get_dcp_group().device_group)
        return keys

    def _readable(
        self, keys: torch.Tensor, chunk: GatheredChunk, layer: AttentionLayer
    ) -> torch.Tensor:
        """A chunk's keys as its kernel reads them; a class may have them in another dtype."""
        return keys

    def _locate(
        self: Any, chunk: GatheredChunk, metadata: Any, block_stride: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The selected keys of a chunk's query rows as rows of the workspace, and their counts."""
        interleave = metadata.cp_kv_cache_interleave_size
        topk = self.topk_indices_buffer[chunk.tokens]
        if not chunk.plan.whole:
            low, high = chunk.plan.positions(self.dcp_world_size, interleave)
            topk = torch.where((topk >= low) & (topk < high), topk, -1)
        return triton_convert_req_index_to_global_index(
            chunk.request_of_token,
            metadata.block_table,
            topk,
            BLOCK_SIZE=metadata.block_size,
            BLOCK_STRIDE_ROWS=block_stride,
            NUM_TOPK_TOKENS=topk.shape[1],
            HAS_PREFILL_WORKSPACE=True,
            prefill_workspace_request_ids=chunk.request_of_token,
            prefill_workspace_starts=chunk.row_starts,
            prefill_workspace_rank_stride=chunk.plan.rows_per_rank,
            dcp_size=self.dcp_world_size,
            dcp_rank=self.dcp_rank,
            cp_kv_cache_interleave_size=interleave,
            return_valid_counts=True,
        )

    def _attend_range(
        self: Any, part: GatheredPart, layer: AttentionLayer, *, with_lse: bool
    ) -> torch.Tensor | None:
        """Writes ``part.out``; returns the natural LSE ``[T, H]`` where it is wanted."""
        _, lse = self._attend(
            part.query,
            part.keys,
            part.topk,
            part.counts,
            layer,
            PAGE_ROWS,
            out=part.out,
            with_lse=with_lse,
        )
        return lse if lse is None or self.lse_base_on_e else lse.mul_(math.log(2.0))

    def _merge_range(
        self: Any, part: GatheredPart, lse: torch.Tensor, layer: AttentionLayer
    ) -> None:
        """Attends a later range of a request; merges it into ``part.out`` and ``lse``, in place."""
        plan: GatherPlan = self.gather_plan
        memory = self._workspace[plan.key_bytes : plan.total_bytes].view(torch.bfloat16)
        partial_outs = memory.view(plan.merge_tokens, *part.out.shape[1:])
        for start in range(0, len(lse), plan.merge_tokens):
            some = slice(start, start + plan.merge_tokens)
            piece = part.tokens(some)
            out = piece.out
            piece.out = partial_outs[: len(out)]
            partial_lse = self._attend_range(piece, layer, with_lse=True)
            # Not in place: threads of a head read the old LSE when another may have written.
            merged_lse = torch.empty_like(partial_lse.T, memory_format=torch.contiguous_format)
            merge_attn_states(
                output=out,
                prefix_output=out,
                prefix_lse=lse[some].T.contiguous(),
                suffix_output=piece.out,
                suffix_lse=partial_lse.T.contiguous(),
                output_lse=merged_lse,
            )
            lse[some] = merged_lse.T


@dataclass(slots=True)
class GatheredPart:
    """Query rows and what they attend: queries, cache blocks, top-k rows and counts, results."""

    query: torch.Tensor
    keys: torch.Tensor
    topk: torch.Tensor
    counts: torch.Tensor
    out: torch.Tensor

    def tokens(self, some: slice) -> GatheredPart:
        """The same for some of the rows."""
        return GatheredPart(
            self.query[some], self.keys, self.topk[some], self.counts[some], self.out[some]
        )
