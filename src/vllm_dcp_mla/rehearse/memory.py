"""What an engine's buffers must take: the sizes that its classes plan, computed apart from them."""

from __future__ import annotations

from ..gather_plan import DEFAULT_GATHER_LIMIT_BYTES, plan_gather
from ..key_splits import partial_bytes
from ..topology import gathered_heads
from ..workspace import DEFAULT_SLAB_LIMIT_BYTES, plan_workspace
from .checkpoint import RehearsalModel
from .configuration import Configuration
from .engine import MAX_NUM_SEQS, EngineSpec


def planned_bytes(
    configuration: Configuration, spec: EngineSpec, model: RehearsalModel, sms: int
) -> dict[str, int]:
    """Bytes of each buffer by its name in :func:`..device_buffer.held`; which are there differs.

    Args:
        configuration: what is rehearsed.
        spec: its engine.
        model: what it serves.
        sms: multiprocessors of the GPU.
    """
    heads = model.heads // configuration.tp
    split = plan_workspace(
        gathered_heads(heads, configuration.tp, configuration.pcp, configuration.dcp),
        spec.max_num_batched_tokens,
        slab_limit_bytes=DEFAULT_SLAB_LIMIT_BYTES,
    )
    gathered = plan_gather(
        limit_bytes=DEFAULT_GATHER_LIMIT_BYTES,
        row_bytes=model.key_elements * (1 if "fp8" in configuration.kv_cache_dtype else 2),
        dcp=configuration.dcp,
        interleave=1,
        max_model_len=spec.max_model_len,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_tokens=spec.max_num_batched_tokens,
        heads=heads,
        latent_dim=model.latent_elements,
    )
    return {
        "workspace": split.total_bytes,
        "partial results": partial_bytes(model.latent_elements, sms),
        "gathered keys": gathered.total_bytes,
    }
