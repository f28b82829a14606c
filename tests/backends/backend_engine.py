"""Implementations built as vLLM builds them, and float64 attention to compare them with."""

import math
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from kernel_call import call_kernel

from release_marks import RELEASE, has_flash_attn_4
from vllm_dcp_mla.models import load_config

#: Numbers of what `backends` returns.
MEMBERS = (0, pytest.param(1, marks=has_flash_attn_4))


def backends():
    """This package's classes for SM100 with the installed series."""
    from vllm_dcp_mla.backends import trtllm

    if "FLASH_ATTN_MLA_SPARSE_FA4" in RELEASE.left_to_stock:
        return (trtllm.DcpFlashInferMLASparseBackend,)
    from vllm_dcp_mla.backends import flash_attn_4

    return trtllm.DcpFlashInferMLASparseBackend, flash_attn_4.DcpFlashAttnMLASparseFA4Backend


@contextmanager
def engine(dcp=8, max_tokens=512, settings=None, model="glm-5.2", pcp=1):
    """A current configuration of rank 0 of TP8 with those PCP and DCP sizes; yields it."""
    from vllm.config import set_current_vllm_config

    from vllm_dcp_mla.selftest import world

    config = world.engine_config(load_config(model), 8, 8, "ag_rs")
    config.parallel_config.decode_context_parallel_size = dcp
    config.parallel_config.prefill_context_parallel_size = pcp
    config.scheduler_config.max_num_batched_tokens = max_tokens
    config.additional_config = {"dcp_mla": {"kernel": "reference", **(settings or {})}}
    with (
        set_current_vllm_config(config),
        mock.patch(
            "vllm.distributed.parallel_state._DCP",
            SimpleNamespace(world_size=dcp, rank_in_group=0),
        ),
        mock.patch(
            "vllm.model_executor.layers.attention.sparse_mla_attention"
            ".get_tensor_model_parallel_world_size",
            lambda: 8,
        ),
    ):
        yield config


def make_impl(backend, config, cache_dtype="bfloat16", dims=(192, 64)):
    nope, rope = dims
    parallel, hf = config.parallel_config, config.model_config.hf_text_config
    return backend.get_impl_cls()(
        num_heads=hf.num_attention_heads // parallel.tensor_parallel_size,
        head_size=512 + rope,
        scale=0.05,
        num_kv_heads=1,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype=cache_dtype,
        logits_soft_cap=None,
        attn_type="decoder",
        kv_sharing_target_layer_name=None,
        q_lora_rank=2048,
        kv_lora_rank=512,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        qk_head_dim=nope + rope,
        v_head_dim=256,
        kv_b_proj=None,
        topk_indices_buffer=torch.empty(512, 128, dtype=torch.int32),
    )


LAYER = SimpleNamespace(_q_scale_float=3.0, _k_scale_float=5.0)


def run(
    impl,
    tokens=4,
    heads=64,
    dim=576,
    dtype=torch.bfloat16,
    counts=(0, 3, 100, 128),
    query_dtype=None,
    **kwargs,
):
    """One call of the kernel method; its inputs and what it returned."""
    draw = torch.Generator().manual_seed(1)
    query = (torch.randn(tokens, heads, dim, generator=draw) / 3).to(query_dtype or dtype)
    cache = (torch.randn(5, 64, dim, generator=draw) / 5).to(dtype)
    counts = torch.tensor(counts, dtype=torch.int32)
    topk = torch.full((tokens, 128), -1, dtype=torch.int32)
    for token, count in enumerate(counts.tolist()):
        topk[token, :count] = torch.randint(5 * 64, (count,), generator=draw).int()
    call = {"layer": LAYER, "block_size": 64, "is_decode": True} | kwargs
    out, lse = call_kernel(impl, query, cache, topk.clone(), counts, **call)
    return query, cache.view(-1, dim), topk, counts, out, lse


def expected(query, rows, topk, counts, scale, value_scale):
    out = torch.zeros(*query.shape[:2], 512, dtype=torch.float64)
    lse = torch.full(query.shape[:2], -math.inf, dtype=torch.float64)
    for token, count in enumerate(counts.tolist()):
        if count:
            keys = rows[topk[token, :count].long()].double()
            scores = query[token].double() @ keys.T * scale
            out[token] = torch.softmax(scores, -1) @ keys[:, :512] * value_scale
            lse[token] = torch.logsumexp(scores, -1)
    return out, lse
