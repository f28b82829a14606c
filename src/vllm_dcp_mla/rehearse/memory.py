"""What an engine's buffers must take: the sizes that its classes plan, computed apart from them.

Ranks inherit this process's environment, and with it the settings.
"""

from __future__ import annotations

from ..gather_plan import plan_gather
from ..key_splits import partial_bytes
from ..settings import load_settings, user_workspace_bytes
from ..topology import gathered_heads
from ..workspace import plan_workspace
from .checkpoint import RehearsalModel
from .configuration import Configuration
from .engine import MAX_NUM_SEQS, EngineSpec

#: Names in :func:`..device_buffer.held` of the buffers whose sizes are planned.
PLANNED = ("workspace", "partial results", "gathered keys")


def planned_bytes(
    name: str, configuration: Configuration, spec: EngineSpec, model: RehearsalModel, sms: int
) -> int:
    """Bytes of a buffer that a rank has.

    Args:
        name: one of :data:`PLANNED`.
        configuration: what is rehearsed.
        spec: its engine.
        model: what it serves.
        sms: multiprocessors of the GPU.
    """
    heads = model.heads // configuration.tp
    if name == "workspace":
        return plan_workspace(
            gathered_heads(heads, configuration.tp, configuration.pcp, configuration.dcp),
            spec.max_num_batched_tokens,
            slab_limit_bytes=load_settings().slab_limit_bytes,
            workspace_bytes=user_workspace_bytes(),
        ).total_bytes
    if name == "partial results":
        return partial_bytes(model.latent_elements, sms)
    return plan_gather(
        limit_bytes=load_settings().gather_limit_bytes,
        row_bytes=model.key_elements * (1 if "fp8" in configuration.kv_cache_dtype else 2),
        dcp=configuration.dcp,
        interleave=1,
        max_model_len=spec.max_model_len,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_tokens=spec.max_num_batched_tokens,
        heads=heads,
        latent_dim=model.latent_elements,
    ).total_bytes
