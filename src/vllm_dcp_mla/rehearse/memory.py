"""What an engine's buffers must take: the sizes that its classes plan, computed apart from them."""

from __future__ import annotations

from ..key_splits import partial_bytes
from ..topology import gathered_heads
from ..workspace import DEFAULT_SLAB_LIMIT_BYTES, plan_workspace
from .checkpoint import RehearsalModel
from .configuration import Configuration
from .engine import EngineSpec


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
    return {
        "workspace": split.total_bytes,
        "partial results": partial_bytes(model.latent_elements, sms),
    }
