"""What vLLM sets for a model where the user sets nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..compat.releases import Release


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """Defaults of one architecture in the newest supported vLLM.

    Attributes:
        comm: ``--dcp-comm-backend``.
        sm10x_kv_cache_dtype: what ``--kv-cache-dtype auto`` means on SM10x GPUs.
    """

    comm: str
    sm10x_kv_cache_dtype: str


_DEFAULTS = ModelDefaults(comm="ag_rs", sm10x_kv_cache_dtype="bfloat16")
_BY_ARCHITECTURE = {
    "GlmMoeDsaForCausalLM": ModelDefaults(comm="a2a", sm10x_kv_cache_dtype="fp8_e4m3"),
    "Glm5NextForCausalLM": ModelDefaults(comm="ag_rs", sm10x_kv_cache_dtype="fp8"),
}


def model_defaults(config: Mapping[str, Any]) -> ModelDefaults:
    """The defaults of a model, by the first entry of its ``architectures``."""
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures and isinstance(architectures[0], str):
        return _BY_ARCHITECTURE.get(architectures[0], _DEFAULTS)
    return _DEFAULTS


def resolve_kv_cache_dtype(
    config: Mapping[str, Any], requested: str, arch: tuple[int, int], release: Release
) -> str:
    """The cache dtype that ``--kv-cache-dtype requested`` leads to on a GPU."""
    if requested != "auto":
        return requested
    if arch[0] != 10 or not release.defaults_to_fp8:
        return "bfloat16"
    return model_defaults(config).sm10x_kv_cache_dtype


def resolve_comm(config: Mapping[str, Any], requested: str | None, pcp: int, dcp: int) -> str:
    """The DCP exchange to use: the one asked for, else one that works.

    PCP with DCP works with ``ag_rs`` only, whatever the model's default is.
    """
    if requested is not None:
        return requested
    return "ag_rs" if pcp > 1 and dcp > 1 else model_defaults(config).comm
