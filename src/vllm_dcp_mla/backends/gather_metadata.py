"""PCP with DCP: what a step's prefill rows gather, and where their keys land.

vLLM's builders describe rows of this rank. This adds the chunks that all ranks gather alike, from
host lengths alone: the build waits for nothing, and layers share it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.mla.sparse_utils import request_row_bounds
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

from ..gather_plan import Chunk, GatherPlan, plan_chunks

#: Elements of int32 that a tensor must begin at a multiple of. Triton compiles for the alignment of
#: a pointer: one that is not aligned would be compiled late, on some ranks only.
_ALIGNED = 4


@dataclass(frozen=True, slots=True)
class GatheredChunk:
    """A chunk as the kernels need it.

    Attributes:
        plan: its requests and rows.
        tokens: the query rows of its requests, as a slice of the step's.
        request_of_token: ``[tokens]`` int32, the chunk's request of each query row, from 0.
        row_starts: ``[requests]`` int32, where a request's row 0 would be in a rank's part of the
            workspace; negative for a later range.
        rows: which of the step's gathered rows the chunk has, as a slice.
    """

    plan: Chunk
    tokens: slice
    request_of_token: torch.Tensor
    row_starts: torch.Tensor
    rows: slice


@dataclass(slots=True)
class GatherStep:
    """All chunks of a step.

    Attributes:
        chunks: in the order in which every rank gathers them.
        num_rows: rows that this rank sends in all of them.
        table_row: ``[segments]`` int32, the block table's row of each request of each chunk.
        row_shift: ``[segments]`` int32, a request's row less its index among the step's rows.
        row_counts: ``[segments]`` int32, its rows.
    """

    chunks: list[GatheredChunk]
    num_rows: int
    table_row: torch.Tensor
    row_shift: torch.Tensor
    row_counts: torch.Tensor
    _cache_rows: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def cache_rows(
        self, block_table: torch.Tensor, block_size: int, block_stride: int
    ) -> torch.Tensor:
        """Physical cache rows of all that this rank sends, ``[num_rows]`` int32.

        Made by the first layer that asks, for all with the same strides. A rank that has fewer rows
        than the fullest sends whatever lies behind its own; no key is ever looked up there.

        Args:
            block_table: ``[requests, blocks]`` int32.
            block_size: rows of a block.
            block_stride: rows from a block to the next.
        """
        key = (block_size, block_stride)
        if key not in self._cache_rows:
            device = block_table.device
            segment = torch.repeat_interleave(self.row_counts, output_size=self.num_rows)
            row = torch.arange(self.num_rows, dtype=torch.int32, device=device)
            row += self.row_shift[segment]
            block = block_table[self.table_row[segment], row // block_size]
            self._cache_rows[key] = block * block_stride + row % block_size
        return self._cache_rows[key]


@dataclass(kw_only=True)
class GatherFields:
    """What is added to vLLM's metadata; ``gather`` is None where nothing is gathered."""

    gather: GatherStep | None = None


class GatherBuilderMixin:
    """Adds the chunks to a builder of vLLM whose metadata has :class:`GatherFields`."""

    #: Most rows of each rank of requests that share a chunk; None for all that the workspace holds.
    most_together: int | None = None

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settle_gather()

    def settle_gather(self: Any) -> None:
        """Plans every layer's gather for the interleave that vLLM has settled on.

        For a KV connector vLLM changes it when the model is loaded already, and the workspace made:
        ``VllmConfig.adjust_dcp_kv_cache_interleave_size``, which ``EngineCore`` calls.
        """
        if self.use_pcp and self.dcp_world_size > 1:
            layers = self.vllm_config.compilation_config.static_forward_context
            for name in self.layer_names:
                layers[name].impl.plan_gather(self.cp_kv_cache_interleave_size)

    def build(
        self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """Stock's metadata, and what its prefill rows gather."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]
        if self.use_pcp and self.dcp_world_size > 1 and metadata.num_prefills:
            layers = self.vllm_config.compilation_config.static_forward_context
            metadata.gather = plan_step(
                common_attn_metadata,
                metadata.num_decodes,
                layers[self.layer_names[0]].impl.gather_plan,
                dcp=self.dcp_world_size,
                interleave=self.cp_kv_cache_interleave_size,
                most_together=self.most_together,
                device=self.device,
            )
        return metadata


def plan_step(
    common: Any,
    num_decodes: int,
    plan: GatherPlan,
    *,
    dcp: int,
    interleave: int,
    device: torch.device,
    most_together: int | None = None,
) -> GatherStep:
    """The chunks of a step, the same on every rank but for the query rows.

    Args:
        common: vLLM's ``CommonAttentionMetadata`` of this rank's rows, decodes first.
        num_decodes: rows of it (requests, in vLLM's words) that are decodes.
        plan: the workspace.
        dcp: ranks that share a request's cache.
        interleave: tokens a rank stores before the next takes over.
        device: where the tensors go.
        most_together: most rows of each rank of requests in one chunk; None for the workspace's.
    """
    requests, shares = _shares(common, num_decodes, dcp, interleave)
    first_rows = requests + num_decodes
    token_of = common.query_start_loc_cpu.numpy()[first_rows]
    chunks = plan_chunks(
        shares.tolist(), plan.rows_per_rank, interleave, most_together=most_together
    )
    packed = _Packed()
    parts: list[tuple[slice, slice, slice, slice]] = []
    sent = 0
    for chunk in chunks:
        first, last = chunk.requests
        rows = np.array(chunk.rows, dtype=np.int32)
        before = np.cumsum(rows, dtype=np.int32) - rows
        tokens = np.diff(token_of[first : last + 1])
        parts.append(
            (
                slice(int(token_of[first]), int(token_of[last])),
                packed.add(np.repeat(np.arange(last - first, dtype=np.int32), tokens)),
                packed.add(before - np.int32(chunk.start)),
                slice(sent, sent + chunk.rows_per_rank),
            )
        )
        sent += chunk.rows_per_rank
    segments = [request for chunk in chunks for request in range(*chunk.requests)]
    counts = np.array([n for chunk in chunks for n in chunk.rows], dtype=np.int32)
    starts = np.repeat([c.start for c in chunks], [len(c.rows) for c in chunks]).astype(np.int32)
    shifts = starts - (np.cumsum(counts, dtype=np.int32) - counts)
    table_row = packed.add(first_rows[segments].astype(np.int32))
    row_shift, row_counts = packed.add(shifts), packed.add(counts)
    here = packed.to(device)
    return GatherStep(
        [
            GatheredChunk(chunk, tokens, here[of_token], here[row_starts], rows)
            for chunk, (tokens, of_token, row_starts, rows) in zip(chunks, parts, strict=True)
        ],
        sent,
        here[table_row],
        here[row_shift],
        here[row_counts],
    )


def _shares(
    common: Any, num_decodes: int, dcp: int, interleave: int
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of the prefill rows of each request, and each request's rows on the fullest rank.

    vLLM tells every rank the whole requests' shares. A dummy batch bypasses what does: there each
    row is a request, the same on every rank.
    """
    req_idx = common.req_idx
    if req_idx is None:
        req_idx = np.arange(common.num_reqs)
    shares = common.dcp_local_seq_lens_cpu_upper_bound
    if shares is None:
        shares = get_dcp_local_seq_lens(common.seq_lens_cpu_upper_bound, dcp, 0, interleave)
    bounds = request_row_bounds(req_idx[num_decodes : common.num_reqs])
    return bounds, shares.numpy()[num_decodes:][bounds[:-1]]


class _Packed:
    """Small int32 arrays that go to the device in one copy, each aligned."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []
        self._size = 0

    def add(self, array: np.ndarray) -> slice:
        """Where the array will be."""
        place = slice(self._size, self._size + len(array))
        padding = -len(array) % _ALIGNED
        self._arrays += [array, np.zeros(padding, dtype=np.int32)]
        self._size += len(array) + padding
        return place

    def to(self, device: torch.device) -> torch.Tensor:
        return async_tensor_h2d(np.concatenate(self._arrays), device=device)
