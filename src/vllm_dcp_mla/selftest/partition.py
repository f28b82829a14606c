"""The rows of a batch that one rank runs: all of them, or what vLLM's PCP manager gives it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ..topology import local_seq_len
from .batch import Batch, Shape


@dataclass(frozen=True, slots=True)
class Rows:
    """A rank's part of a batch.

    Attributes:
        tokens: ``[T]`` int64, which tokens of the batch its query rows are; padding included.
        request: ``[rows]`` int64, the request of each row of vLLM's metadata.
        common: vLLM's ``CommonAttentionMetadata``.
    """

    tokens: torch.Tensor
    request: torch.Tensor
    common: Any


def rows_of_rank(
    shape: Shape, batch: Batch, table: torch.Tensor, config: Any, rank: int, device: torch.device
) -> Rows:
    """This rank's rows; the configuration and vLLM's groups are current.

    Args:
        shape: the batch's shape.
        batch: the batch, whole.
        table: ``[requests, width]`` int32, this rank's blocks of each request.
        config: the engine's configuration.
        rank: rank in the DCP group.
        device: where tensors go.
    """
    if config.parallel_config.prefill_context_parallel_size > 1:
        return _partitioned(shape, table, config, rank, device)
    starts = torch.tensor([0, *shape.query_lens], dtype=torch.int32).cumsum(0).int()
    seq_lens = torch.tensor(shape.seq_lens, dtype=torch.int32)
    common = _metadata(
        config,
        rank,
        starts,
        seq_lens,
        table,
        num_tokens=len(batch.query),
        is_prefilling=torch.arange(len(shape.seq_lens)) >= shape.num_decodes,
        interleave=shape.interleave,
        device=device,
    )
    return Rows(torch.arange(len(batch.query)), torch.arange(len(seq_lens)), common)


def _partitioned(
    shape: Shape, table: torch.Tensor, config: Any, rank: int, device: torch.device
) -> Rows:
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.pcp_manager import maybe_build_pcp_manager

    assert not shape.padding, "vLLM pads graphs of PCP ranks itself"
    manager = maybe_build_pcp_manager(config, device, supports_mm_inputs=False)
    local = manager.partition_batch(
        _input_batch(shape, device), SimpleNamespace(cg_mode=CUDAGraphMode.NONE)
    )
    rows, tokens = local.num_reqs, local.num_tokens
    request = torch.from_numpy(local.idx_mapping_np[:rows].astype(np.int64))
    starts = torch.from_numpy(local.query_start_loc_np[: rows + 1])
    token_request = request.repeat_interleave(starts.diff().long())
    first_token = torch.tensor([0, *shape.query_lens]).cumsum(0)
    first_position = torch.tensor(shape.seq_lens) - torch.tensor(shape.query_lens)
    positions = local.positions[:tokens].cpu()
    common = _metadata(
        config,
        rank,
        starts,
        local.seq_lens_cpu_upper_bound[:rows],
        table[request],
        num_tokens=tokens,
        is_prefilling=torch.from_numpy(local.is_prefilling_np[:rows]),
        interleave=shape.interleave,
        device=device,
    )
    common = common.replace(
        req_idx=local.idx_mapping_np,
        positions=local.positions,
        dcp_local_seq_lens_cpu_upper_bound=local.pcp.dcp_local_seq_lens_cpu_upper_bound[:rows],
    )
    return Rows(
        positions - first_position[token_request] + first_token[token_request], request, common
    )


def _input_batch(shape: Shape, device: torch.device) -> Any:
    """The whole batch as vLLM's runner has it before it is partitioned."""
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

    requests, tokens = len(shape.seq_lens), shape.num_tokens
    batch = InputBatch.make_dummy(requests, tokens, InputBuffers(requests, tokens, device))
    queries = np.array(shape.query_lens, dtype=np.int32)
    lengths = np.array(shape.seq_lens, dtype=np.int32)
    starts = np.concatenate(([0], queries.cumsum())).astype(np.int32)
    computed = lengths - queries
    prefilling = np.arange(requests) >= shape.num_decodes
    positions = np.concatenate([np.arange(c, n) for c, n in zip(computed, lengths, strict=True)])
    return replace(
        batch,
        num_scheduled_tokens=queries,
        query_start_loc=torch.from_numpy(starts).to(device),
        query_start_loc_np=starts,
        seq_lens=torch.from_numpy(lengths).to(device),
        seq_lens_cpu_upper_bound=torch.from_numpy(lengths),
        num_computed_tokens_np=computed,
        prefill_len_np=np.where(prefilling, lengths, computed),
        num_computed_prefill_tokens_np=computed,
        is_prefilling_np=prefilling,
        has_prefill=bool(prefilling.any()),
        positions=torch.from_numpy(positions).to(device),
    )


def _metadata(
    config: Any,
    rank: int,
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
    table: torch.Tensor,
    *,
    num_tokens: int,
    is_prefilling: torch.Tensor,
    interleave: int,
    device: torch.device,
) -> Any:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    dcp = config.parallel_config.decode_context_parallel_size
    local = [local_seq_len(n, rank, dcp, interleave) for n in seq_lens.tolist()]
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=seq_lens.to(device),
        num_reqs=len(seq_lens),
        num_actual_tokens=num_tokens,
        max_query_len=int(starts.diff().max()),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=table.to(device),
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
        dcp_local_seq_lens=torch.tensor(local, dtype=torch.int32).to(device),
        seq_lens_cpu_upper_bound=seq_lens,
        is_prefilling=is_prefilling,
    )
