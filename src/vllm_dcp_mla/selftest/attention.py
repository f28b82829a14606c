"""One rank's attention step: vLLM's own layer code around this package's backend and builders.

The layer's step is called on a stand-in that has what it reads: query gather, ``forward_mqa``,
merge, and the identity in place of the projection that follows.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

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
from .partition import rows_of_rank
from .selection import select_keys
from .subjects import Subject
from .world import Sizes


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
    sizes: Sizes,
    seed: int,
    device_type: str,
    subject: Subject,
    fault: str | None = None,
    settings: dict[str, Any] | None = None,
) -> list[StepResult]:
    """Runs a step of each shape on this rank; compares its tokens and heads with float64 attention.

    Args:
        rank, num_ranks, folder: as :func:`.world.run_ranks` gives them.
        shapes: the batches.
        model_config: the model's ``config.json``.
        comm: ``--dcp-comm-backend``.
        sizes: parallel sizes; their product of TP and PCP is ``num_ranks``.
        seed: of the random numbers.
        device_type: ``cpu`` or ``cuda``.
        subject: whose backend.
        fault: a planted fault, or None.
        settings: settings of the package.
    """
    from vllm.config import set_current_vllm_config

    assert num_ranks == sizes.num_ranks
    backend = subject.backend()
    device = world.place(rank, device_type)
    config = world.engine_config(
        model_config, sizes.tp, sizes.dcp, comm, subject.kernel, pcp=sizes.pcp, **(settings or {})
    )
    hf = config.model_config.hf_text_config
    results = []
    with (
        set_current_vllm_config(config),
        torch.inference_mode(),
        faults.planted(fault, backend),
    ):
        group = world.join(rank, sizes, folder)
        calls = observe.count_collectives()
        for shape in shapes:
            started = time.perf_counter()
            calls.clear()
            config.parallel_config.cp_kv_cache_interleave_size = shape.interleave
            config.cache_config.cache_dtype = shape.cache_dtype
            if shape.late_rank == rank:
                time.sleep(1)
            batch = make_batch(shape, seed, quantizes_query=subject.quantizes_query)
            heads = shape.num_heads // sizes.tp
            first = rank % sizes.tp * heads
            mine = slice(first, first + heads)
            builds = observe.Builds()
            out, tokens = _attend(backend, group, shape, batch, mine, config, seed, device, builds)
            wanted = expected_output(shape, batch, _scale(hf))[tokens, mine]
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """The merged output of this rank's heads, ``[T, heads, 512]``, and which tokens it has."""
    rank, dcp = group.rank_in_group, group.world_size
    cache, table = shard_cache(shape, batch, rank, dcp, seed)
    rows = rows_of_rank(shape, batch, table, config, rank, device)
    query = batch.query[rows.tokens][:, heads].to(device).contiguous()
    topk = select_keys(group, config, shape, batch, rows, builds)
    impl = _make_impl(backend, config, shape, topk, query.shape[1])
    layer = _make_layer(impl, config, batch, query)
    builder = _make_builder(backend, config, shape, layer, device)
    with builds.watch(device):
        metadata = builder.build(0, rows.common)
    return _run_layer(layer, query, cache.to(device), metadata), rows.tokens


def _run_layer(layer: Any, query: torch.Tensor, cache: torch.Tensor, metadata: Any) -> torch.Tensor:
    """vLLM's attention step of the layer, up to the projection of its output."""
    from vllm.models.deepseek_v32 import attention as stock

    out = torch.full((len(query), query.shape[1] * LATENT_DIM), float("nan")).bfloat16()
    out = out.to(query.device)
    latent, rotary = query[..., :LATENT_DIM], query[..., LATENT_DIM:]
    slots = metadata.slot_mapping
    context = mock.patch.object(
        stock, "get_attention_context", return_value=(metadata, layer, cache, slots)
    )
    nothing = torch.empty(len(query), 0, device=query.device)
    with context:
        stock.DeepseekV32Attention._sparse_indexer_and_attn(
            layer,
            *(nothing, nothing, latent, rotary, None, None, None),
            *(latent, rotary, latent, query if layer._fp8_query else rotary, out),
        )
    return out.view(len(query), query.shape[1], LATENT_DIM)


def _make_impl(backend: Any, config: Any, shape: Shape, topk: torch.Tensor, heads: int) -> Any:
    hf = config.model_config.hf_text_config
    impl = backend.get_impl_cls()(
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
    impl.index_group = None  # of one layer there is none
    impl.do_kv_cache_update = lambda *args: None  # the cache is written already
    return impl


def _make_layer(impl: Any, config: Any, batch: Batch, query: torch.Tensor) -> Any:
    from vllm.v1.attention.ops.dcp import MLADCPManager

    use_pcp = config.parallel_config.prefill_context_parallel_size > 1
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
        use_pcp=use_pcp,
    )
    heads = query.shape[1]
    identity = torch.eye(LATENT_DIM, dtype=torch.bfloat16, device=query.device)
    return SimpleNamespace(
        impl=impl,
        layer_name="selftest",
        indexer=None,
        skip_topk=True,
        use_pcp=use_pcp,
        pcp_shard_decode_requests=False,
        kv_cache_dtype=impl.kv_cache_dtype,
        num_heads=heads,
        num_local_heads=heads,
        kv_lora_rank=LATENT_DIM,
        v_head_dim=LATENT_DIM,
        W_UV=identity.expand(heads, -1, -1),
        _use_sparse_mha=lambda metadata: False,
        _fp8_query=query.dtype == torch.float8_e4m3fn,
        _fp8_kv_needs_view=False,
        _k_scale=None,
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


def _worst_error(out: torch.Tensor, wanted: torch.Tensor) -> float:
    if not bool(torch.isfinite(out).all()):
        return float("inf")
    # Padding is expected to be 0; compare it absolutely.
    norm = wanted.norm(dim=-1)
    error = (out - wanted).norm(dim=-1)
    return float((error / torch.where(norm > 0, norm, 1.0)).max())
