"""One rank's attention step, as the DeepSeek-V3.2 layer does it under DCP.

Query gather, ``forward_mqa`` and merge are vLLM's; the backend and the builders are ours.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from . import faults, observe, world
from .batch import (
    HEAD_DIM,
    LATENT_DIM,
    ROPE_DIM,
    Batch,
    Shape,
    expected_output,
    make_batch,
    shard_cache,
)
from .selection import select_keys
from .subjects import Subject


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one rank saw.

    Attributes:
        error: largest ``|out - expected| / |expected|`` of a token and head; inf for NaN.
        collectives: calls of the DCP group's collectives, in order.
        builds: what was seen inside the metadata builds.
        seconds: wall time of the step, its check included.
    """

    error: float
    collectives: tuple[str, ...]
    builds: observe.Builds
    seconds: float


def run_steps(
    rank: int,
    num_ranks: int,
    folder: Path,
    shapes: tuple[Shape, ...],
    model_config: dict[str, Any],
    comm: str,
    dcp: int,
    seed: int,
    device_type: str,
    subject: Subject,
    fault: str | None = None,
) -> list[StepResult]:
    """Runs a step of each shape on this rank; compares this rank's heads with float64 attention."""
    from vllm.config import set_current_vllm_config

    backend = subject.backend()
    device = world.place(rank, device_type)
    config = world.engine_config(model_config, num_ranks, dcp, comm, subject.kernel)
    hf = config.model_config.hf_text_config
    results = []
    with (
        set_current_vllm_config(config),
        torch.inference_mode(),
        faults.planted(fault, backend),
    ):
        group = world.join(rank, num_ranks, dcp, folder)
        calls = observe.count_collectives(group)
        for shape in shapes:
            started = time.perf_counter()
            calls.clear()
            config.parallel_config.cp_kv_cache_interleave_size = shape.interleave
            config.cache_config.cache_dtype = shape.cache_dtype
            if shape.late_rank == rank:
                time.sleep(1)
            batch = make_batch(shape, seed, quantizes_query=subject.quantizes_query)
            heads = shape.num_heads // num_ranks
            mine = slice(rank * heads, (rank + 1) * heads)
            builds = observe.Builds()
            out = _attend(backend, group, shape, batch, mine, config, seed, device, builds)
            wanted = expected_output(shape, batch, _scale(hf))[:, mine]
            error = _worst_error(out.cpu().double(), wanted)
            seconds = time.perf_counter() - started
            results.append(StepResult(error, tuple(calls), builds, seconds))
        world.leave()
    return results


def _scale(hf: Any) -> float:
    return 1.0 / math.sqrt(hf.qk_nope_head_dim + hf.qk_rope_head_dim)


def _attend(
    backend: Any,
    group: Any,
    shape: Shape,
    batch: Batch,
    heads: slice,
    config: Any,
    seed: int,
    device: torch.device,
    builds: observe.Builds,
) -> torch.Tensor:
    """The merged output of this rank's heads, ``[T, heads, 512]``, on ``device``."""
    rank, dcp = group.rank_in_group, group.world_size
    cache, table = shard_cache(shape, batch, rank, dcp, seed)
    query = batch.query[:, heads].to(device).contiguous()
    common = _common_metadata(shape, batch, table, rank, dcp, device)
    indexed = common.replace(num_actual_tokens=shape.num_tokens)
    topk = select_keys(group, config, shape, batch, indexed, builds)
    impl = _make_impl(backend, config, shape, topk, query.shape[1])
    layer = _make_layer(impl, config, batch, query)
    builder = _make_builder(backend, config, shape, layer, device)
    with builds.watch(device):
        metadata = builder.build(0, common)
    gathered = layer.dcp_manager.query_gather(query)
    out, lse = impl.forward_mqa(gathered, cache.to(device), metadata, layer)
    return layer.dcp_manager.combine(out, lse, seq_lens=None, query_start_loc=None)


def _make_impl(backend: Any, config: Any, shape: Shape, topk: torch.Tensor, heads: int) -> Any:
    hf = config.model_config.hf_text_config
    return backend.get_impl_cls()(
        num_heads=heads,
        head_size=HEAD_DIM,
        scale=_scale(hf),
        num_kv_heads=1,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype=shape.cache_dtype,
        logits_soft_cap=None,
        attn_type="decoder",
        kv_sharing_target_layer_name=None,
        q_lora_rank=hf.q_lora_rank,
        kv_lora_rank=LATENT_DIM,
        qk_nope_head_dim=hf.qk_nope_head_dim,
        qk_rope_head_dim=ROPE_DIM,
        qk_head_dim=hf.qk_nope_head_dim + ROPE_DIM,
        v_head_dim=hf.v_head_dim,
        kv_b_proj=None,
        topk_indices_buffer=topk,
    )


def _make_layer(impl: Any, config: Any, batch: Batch, query: torch.Tensor) -> Any:
    from vllm.v1.attention.ops.dcp import MLADCPManager

    manager = MLADCPManager(
        vllm_config=config,
        device=query.device,
        num_heads=query.shape[1],
        query_head_dim=HEAD_DIM,
        output_head_dim=LATENT_DIM,
        query_dtype=query.dtype,
        output_dtype=torch.bfloat16,
        padded_num_heads=None,
        is_lse_base_on_e=impl.lse_base_on_e,
        use_pcp=False,
    )
    return SimpleNamespace(
        impl=impl,
        dcp_manager=manager,
        prefill_backend=None,
        _q_scale_float=batch.query_scale,
        _k_scale_float=batch.key_scale,
    )


def _make_builder(backend: Any, config: Any, shape: Shape, layer: Any, device: torch.device) -> Any:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    name = f"selftest.{shape.name}"
    config.compilation_config.static_forward_context[name] = layer
    spec = MLAAttentionSpec(
        block_size=shape.block_size,
        num_kv_heads=1,
        head_size=HEAD_DIM,
        dtype=torch.bfloat16,
        cache_dtype_str=shape.cache_dtype,
    )
    return backend.get_builder_cls()(spec, [name], config, device)


def _common_metadata(
    shape: Shape, batch: Batch, table: torch.Tensor, rank: int, dcp: int, device: torch.device
) -> Any:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from ..topology import local_seq_len

    starts = torch.tensor([0, *shape.query_lens], dtype=torch.int32).cumsum(0).int()
    seq_lens = torch.tensor(shape.seq_lens, dtype=torch.int32)
    local = [local_seq_len(n, rank, dcp, shape.interleave) for n in shape.seq_lens]
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=seq_lens.to(device),
        num_reqs=len(shape.seq_lens),
        num_actual_tokens=len(batch.query),
        max_query_len=max(shape.query_lens),
        max_seq_len=max(shape.seq_lens),
        block_table_tensor=table.to(device),
        slot_mapping=torch.full((len(batch.query),), -1, dtype=torch.int64, device=device),
        dcp_local_seq_lens=torch.tensor(local, dtype=torch.int32).to(device),
        seq_lens_cpu_upper_bound=seq_lens,
        is_prefilling=torch.arange(len(shape.seq_lens)) >= shape.num_decodes,
    )


def _worst_error(out: torch.Tensor, wanted: torch.Tensor) -> float:
    if not bool(torch.isfinite(out).all()):
        return float("inf")
    # Padding is expected to be 0; compare it absolutely.
    norm = wanted.norm(dim=-1)
    error = (out - wanted).norm(dim=-1)
    return float((error / torch.where(norm > 0, norm, 1.0)).max())
