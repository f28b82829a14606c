"""vLLM's current configuration in the terms of the capability table."""

from __future__ import annotations

from typing import Any

from ..capability import Deployment, ModelDims
from ..compat.libraries import libraries_here
from ..settings import KernelChoice


def deployment_of(
    vllm_config: Any, kv_cache_dtype: str | None, capability: Any, *, kernel: KernelChoice
) -> Deployment:
    """Reads a deployment off vLLM's configuration.

    Args:
        vllm_config: vLLM's ``VllmConfig`` with a model.
        kv_cache_dtype: the layer's cache dtype; None means auto.
        capability: vLLM's ``DeviceCapability``.
        kernel: the setting ``kernel``.
    """
    parallel = vllm_config.parallel_config
    hf = vllm_config.model_config.hf_text_config
    return Deployment(
        arch=(capability.major, capability.minor),
        kv_cache_dtype=kv_cache_dtype or "auto",
        tp=parallel.tensor_parallel_size,
        pcp=parallel.prefill_context_parallel_size,
        dcp=parallel.decode_context_parallel_size,
        comm=parallel.dcp_comm_backend or "ag_rs",
        dims=ModelDims(
            heads=hf.num_attention_heads,
            kv_lora_rank=hf.kv_lora_rank,
            qk_nope_head_dim=hf.qk_nope_head_dim,
            qk_rope_head_dim=hf.qk_rope_head_dim,
            index_topk=getattr(hf, "index_topk", None),
        ),
        libraries=libraries_here(),
        kernel=kernel,
        interleave=parallel.cp_kv_cache_interleave_size,
    )
