"""Metadata of one prefill chunk, from host lengths alone: nothing waits for the GPU.

Stock reads two totals back from the GPU in every chunk. They follow from the lengths on the host,
which are exact for prefills and never too small otherwise; every rank derives the same from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerPrefillChunkMetadata

from ..compat.adapter import load_adapter
from .chunk_kernel import write_chunk_bounds
from .lengths import local_lengths

_ALIGNMENT = 16  # bytes that Triton compiles pointers for
_ABSENT_FIELDS: frozenset[str] = load_adapter().ABSENT_CHUNK_FIELDS


@dataclass(slots=True)
class Requests:
    """What all chunks of the same requests share.

    Attributes:
        cu_seq_lens: ``[requests + 1]`` int32, cumulative compressed lengths.
        local_cu_seq_lens: the same of this rank's shard.
        row_start: ``[requests]`` (at least) int32, first row of each request in the gathered keys.
        token_to_seq: ``[total]`` int32, the request of each key.
        total: compressed keys of all ranks, at least.
        local_total: those of this rank.
        max_local_total: those of the rank that has most; the same on every rank.
        max_key_len: most keys of a request that a rank stores, the same on every rank.
        pcp_deinterleave_idx: stock's, where a PCP plan gathers keys.
        origin: the first query token in the step.
        block_table: ``[requests, blocks]`` int32.
        key_start, key_end: ``[query rows]`` int32, the keys of each row.
    """

    cu_seq_lens: torch.Tensor
    local_cu_seq_lens: torch.Tensor
    row_start: torch.Tensor
    token_to_seq: torch.Tensor
    total: int
    local_total: int
    max_local_total: int
    max_key_len: int
    pcp_deinterleave_idx: torch.Tensor | None = None
    origin: int = 0
    block_table: torch.Tensor = field(init=False)
    key_start: torch.Tensor = field(init=False)
    key_end: torch.Tensor = field(init=False)


@dataclass(slots=True)
class ChunkBuild:
    """One ``build()``; what chunks of the same requests share is made with the first of them."""

    requests: dict[tuple[int, int], Requests] = field(default_factory=dict)

    def chunk_metadata(
        self,
        start_idx: int,
        end_idx: int,
        query_start_loc: torch.Tensor,
        query_start_loc_cpu: torch.Tensor,
        uncompressed_seq_lens: torch.Tensor,
        compressed_seq_lens: torch.Tensor,
        compressed_seq_lens_cpu: torch.Tensor,
        block_table: torch.Tensor,
        compress_ratio: int,
        query_slice: slice | None = None,
        skip_kv_gather: bool = False,
        dcp_rank: int = 0,
        dcp_world_size: int = 1,
        cp_kv_cache_interleave_size: int = 1,
        pcp_plan: Any | None = None,
    ) -> DeepseekV32IndexerPrefillChunkMetadata | None:
        """The metadata of requests ``[start_idx, end_idx)``, from stock's arguments.

        Returns:
            None where the requests have no keys.
        """
        # Stock plans anew for every chunk, from its requests alone: all chunks' plans are equal.
        requests = self.requests.get((start_idx, end_idx))
        if requests is None:
            span = slice(start_idx, end_idx)
            lengths_cpu = compressed_seq_lens_cpu[span]
            # A plan's keys are gathered from all ranks: rows are bounded globally.
            rank, world = (dcp_rank, dcp_world_size) if pcp_plan is None else (0, 1)
            if pcp_plan is None:
                requests = _sharded(
                    *(compressed_seq_lens[span], lengths_cpu, rank, world),
                    cp_kv_cache_interleave_size,
                )
            else:
                requests = _planned(pcp_plan, lengths_cpu, block_table.device)
            self.requests[start_idx, end_idx] = requests
            if requests.total:
                requests.origin, stop = (int(query_start_loc_cpu[i]) for i in (start_idx, end_idx))
                requests.block_table = block_table[span]
                # A row that no request reaches sees no keys.
                requests.key_start, requests.key_end = torch.zeros(
                    (2, stop - requests.origin), dtype=torch.int32, device=block_table.device
                )
                write_chunk_bounds(
                    query_start_loc=query_start_loc[start_idx : end_idx + 1],
                    seq_lens=uncompressed_seq_lens[span],
                    cu_seq_lens=requests.cu_seq_lens,
                    row_start=requests.row_start,
                    token_to_seq=requests.token_to_seq,
                    key_start=requests.key_start,
                    key_end=requests.key_end,
                    token_origin=requests.origin,
                    dcp_rank=rank,
                    dcp_world=world,
                    interleave=cp_kv_cache_interleave_size,
                    num_requests=end_idx - start_idx,
                    compress_ratio=compress_ratio,
                )
        if requests.total == 0:
            return None
        most = requests.key_start.shape[0]
        rows = query_slice if query_slice is not None else slice(0, most)
        # A PCP rank with a short tail has fewer rows than the plan that all ranks share.
        rows = slice(min(rows.start, most), min(rows.stop, most))
        key_start = requests.key_start[rows]
        if key_start.data_ptr() % _ALIGNMENT:
            # Up to 0.32 stock's kernel for candidates has a variant for such a view, not warmed.
            key_start = key_start.clone()
        return _metadata(
            block_table=requests.block_table,
            cu_seqlen_ks=key_start,
            cu_seqlen_ke=requests.key_end[rows],
            cu_seq_lens=requests.cu_seq_lens,
            token_to_seq=requests.token_to_seq,
            total_seq_lens=requests.total,
            max_seqlen_k=requests.max_key_len,
            token_start=requests.origin + rows.start,
            token_end=requests.origin + rows.stop,
            num_reqs=end_idx - start_idx,
            skip_kv_gather=skip_kv_gather or rows.start > 0,
            local_cu_seq_lens=requests.local_cu_seq_lens,
            local_total_seq_lens=requests.local_total,
            max_local_total_seq_lens=requests.max_local_total,
            pcp_deinterleave_idx=requests.pcp_deinterleave_idx,
        )


def _metadata(**fields: Any) -> DeepseekV32IndexerPrefillChunkMetadata:
    """Stock's metadata, without the fields that its series does not have."""
    present = {n: value for n, value in fields.items() if n not in _ABSENT_FIELDS}
    return DeepseekV32IndexerPrefillChunkMetadata(**present)


def _cumulative(lengths: torch.Tensor) -> torch.Tensor:
    cumulative = torch.zeros(lengths.shape[0] + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths, dim=0, out=cumulative[1:])
    return cumulative


def _sharded(
    lengths: torch.Tensor, lengths_cpu: torch.Tensor, rank: int, world: int, interleave: int
) -> Requests:
    local_cpu = local_lengths(lengths_cpu, rank, world, interleave)
    most_cpu = local_lengths(lengths_cpu, 0, world, interleave)  # rank 0 has most, always
    total = int(lengths_cpu.sum())
    cu_seq_lens = _cumulative(lengths)
    local_cu = cu_seq_lens
    if world > 1:
        local_cu = _cumulative(local_lengths(lengths, rank, world, interleave))
    return Requests(
        cu_seq_lens=cu_seq_lens,
        local_cu_seq_lens=local_cu,
        row_start=local_cu,
        token_to_seq=torch.empty(total, dtype=torch.int32, device=lengths.device),
        total=total,
        local_total=int(local_cpu.sum()),
        max_local_total=int(most_cpu.sum()),
        max_key_len=int(most_cpu.max()),
    )


def _planned(plan: Any, lengths_cpu: torch.Tensor, device: torch.device) -> Requests:
    return Requests(
        cu_seq_lens=plan.global_cu,
        local_cu_seq_lens=plan.padded_local_cu,
        row_start=plan.row_start_cu,
        token_to_seq=torch.empty(plan.total, dtype=torch.int32, device=device),
        total=plan.total,
        local_total=plan.padded_local_total,
        max_local_total=plan.padded_local_total,
        max_key_len=int(lengths_cpu.max()),
        pcp_deinterleave_idx=plan.deinterleave_idx,
    )
