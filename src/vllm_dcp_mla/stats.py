"""A ``vllm.stat_logger_plugins`` entry point: the plan that took effect, once, and as gauges.

vLLM makes one for each engine in the API server's process, where it serves. The line is logged for
DSA models under DCP alone; gauges are off unless the setting ``metrics`` is on. Nothing of ours
happens per step, but vLLM (``AsyncLLM``) gathers its statistics wherever a stat logger is
installed, whatever ``--disable-log-stats`` says: it asks for loggers before it has one, by class,
so that none can decline.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.metrics.loggers import StatLoggerBase

from .plugin import why_off
from .settings import load_settings, user_workspace_bytes
from .topology import gathered_heads
from .workspace import WorkspacePlan, plan_workspace

logger = logging.getLogger("vllm.dcp_mla.stats")

PREFIX = "dcp_mla:"
#: Name of each gauge without its prefix, and its help text.
GAUGES = {
    "dcp_world_size": "ranks that share the KV cache of a request",
    "kv_tokens_per_rank": "rows of a rank's KV cache",
    "kv_tokens_logical": "tokens of requests that all ranks hold together",
    "workspace_bytes": "bytes of the trtllm-gen workspace of a rank; 0 where there is none",
    "tokens_per_launch": "most tokens of an attention launch; 0 where launches are not split",
}
_PACKED_CACHES = ("fp8_ds_mla", "nvfp4_ds_mla")
_LABELS = ("model_name", "engine")


@dataclass(frozen=True, slots=True)
class InEffect:
    """What an engine runs with; ``workspace`` is None off trtllm-gen."""

    tp: int
    pcp: int
    dcp: int
    cache_dtype: str
    blocks: int
    block_size: int
    workspace: WorkspacePlan | None

    @property
    def tokens_per_rank(self) -> int:
        """Rows of a rank's cache."""
        return self.blocks * self.block_size

    def gauges(self) -> dict[str, int]:
        """The values of :data:`GAUGES`."""
        w = self.workspace
        return {
            "dcp_world_size": self.dcp,
            "kv_tokens_per_rank": self.tokens_per_rank,
            "kv_tokens_logical": self.tokens_per_rank * self.dcp,
            "workspace_bytes": w.total_bytes if w else 0,
            "tokens_per_launch": w.tokens_per_launch if w else 0,
        }


def in_effect(config: Any) -> InEffect | None:
    """Reads an engine's configuration; None where it is no DSA model under DCP."""
    parallel, cache = config.parallel_config, config.cache_config
    hf = config.model_config.hf_text_config
    dcp = parallel.decode_context_parallel_size
    if dcp == 1 or getattr(hf, "index_topk", None) is None:
        return None
    return InEffect(
        tp=parallel.tensor_parallel_size,
        pcp=parallel.prefill_context_parallel_size,
        dcp=dcp,
        cache_dtype=cache.cache_dtype,
        blocks=cache.num_gpu_blocks or 0,
        block_size=cache.block_size,
        workspace=_workspace(config, hf.num_attention_heads),
    )


def _workspace(config: Any, heads: int) -> WorkspacePlan | None:
    capability = current_platform.get_device_capability()
    if capability is None or capability.major != 10:
        return None
    if config.cache_config.cache_dtype in _PACKED_CACHES:
        return None
    parallel = config.parallel_config
    tp = parallel.tensor_parallel_size
    sizes = (tp, parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size)
    return plan_workspace(
        gathered_heads(heads // tp, *sizes),
        config.scheduler_config.max_num_batched_tokens,
        slab_limit_bytes=load_settings(config.additional_config).slab_limit_bytes,
        workspace_bytes=user_workspace_bytes(),
    )


class DcpMlaStatLogger(StatLoggerBase):
    """Logs and exports once; records nothing."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._config = vllm_config
        self._engine = engine_index

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Called every step; the figures do not change."""

    def log_engine_initialized(self) -> None:
        """Called once the KV cache has its size."""
        if why_off() is not None:
            return
        effect = in_effect(self._config)
        if effect is None:
            return
        launches = ""
        if effect.workspace is not None:
            launches = (
                f"; attention workspace {effect.workspace.total_bytes:,} bytes, "
                f"{effect.workspace.tokens_per_launch:,} tokens a launch at "
                f"{effect.workspace.num_heads} heads"
            )
        logger.info(
            "Plan in effect for engine %d: tp %d, pcp %d, dcp %d, %s cache; %s tokens a rank, %s "
            "of requests%s.",
            self._engine,
            effect.tp,
            effect.pcp,
            effect.dcp,
            effect.cache_dtype,
            f"{effect.tokens_per_rank:,}",
            f"{effect.tokens_per_rank * effect.dcp:,}",
            launches,
        )
        if load_settings(self._config.additional_config).metrics:
            model = self._config.model_config.served_model_name
            _export(effect, str(model), str(self._engine))


_exported: dict[str, Any] = {}


def _export(effect: InEffect, model: str, engine: str) -> None:
    """Sets the gauges; engines of a process share them, apart by label."""
    from prometheus_client import Gauge

    for name, value in effect.gauges().items():
        if name not in _exported:
            _exported[name] = Gauge(
                PREFIX + name, GAUGES[name], _LABELS, multiprocess_mode="mostrecent"
            )
        _exported[name].labels(model_name=model, engine=engine).set(value)
