"""An engine's configuration and an implementation, as vLLM makes them, on the CPU."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

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
def engine(dcp=8, max_tokens=512, settings=None, model="glm-5.2"):
    """A current configuration of one rank of TP8 with that DCP size; yields it."""
    from vllm.config import set_current_vllm_config

    from vllm_dcp_mla.selftest import world

    config = world.engine_config(load_config(model), 8, 8, "ag_rs")
    config.parallel_config.decode_context_parallel_size = dcp
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
