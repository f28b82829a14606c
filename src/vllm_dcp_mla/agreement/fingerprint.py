"""What a rank is: all that must be the same on every rank of an engine.

Every value is one that this package or vLLM understands; no other environment variable is read, so
that nothing private reaches the store.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from .. import __version__
from ..compat.installed import installed_version, package_folder
from ..compat.releases import installed_release
from ..compat.versions import is_tested
from ..settings import ENV_ONLY, Settings, env_name, load_settings
from .differences import AUTOTUNE, HOST

_DISTRIBUTIONS = ("vllm", "torch", "triton", "flashinfer-python")
#: vLLM's variables whose effect must be the same everywhere.
_VLLM_PREFIXES = ("VLLM_FLASHINFER_", "VLLM_USE_DIRECT_DCP_", "VLLM_SPARSE_INDEXER_")
#: A path, which may differ between machines.
_VLLM_EXCEPT = frozenset({"VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR"})
#: They choose algorithm, protocol, channels and transport, which both ends of a connection share.
#: Interfaces, adapters and logs are a machine's own affair.
_OTHER_VARIABLES = (
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_NTHREADS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"),
    *("NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_BUFFSIZE", "NCCL_LL_BUFFSIZE"),
    *("NCCL_LL128_BUFFSIZE", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE"),
    *("NCCL_NET", "NCCL_IB_DISABLE", "NCCL_CROSS_NIC", "NCCL_COLLNET_ENABLE"),
    *("NCCL_NVLS_ENABLE", "NCCL_MNNVL_ENABLE", "NCCL_CUMEM_ENABLE"),
    "TRITON_INTERPRET",
)


def rank_fingerprint(vllm_config: Any, world_rank: int, launch: dict[str, Any]) -> dict[str, str]:
    """This rank's fingerprint.

    Args:
        vllm_config: the engine's ``VllmConfig``.
        world_rank: rank in the world that vLLM's groups are parts of.
        launch: what the backend decided, by name.

    Returns:
        Field name to value, as texts.
    """
    vllm_version = installed_version("vllm")
    parallel = vllm_config.parallel_config
    fields = {
        HOST: socket.gethostname(),
        "vllm-dcp-mla": __version__,
        **{name: installed_version(name) or "not installed" for name in _DISTRIBUTIONS},
        "vLLM in the tested range": _yes(vllm_version is not None and is_tested(vllm_version)),
        **{name.replace("_", " "): value for name, value in launch.items()},
        "--cp-kv-cache-interleave-size": parallel.cp_kv_cache_interleave_size,
        "--dcp-comm-backend": parallel.dcp_comm_backend or "ag_rs",
        "--max-num-batched-tokens": vllm_config.scheduler_config.max_num_batched_tokens,
        **_settings(vllm_config),
        **_environment(),
        AUTOTUNE: _autotune_cache(vllm_config, world_rank),
    }
    return {name: "unset" if value is None else str(value) for name, value in fields.items()}


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _settings(vllm_config: Any) -> dict[str, Any]:
    """The settings in force, wherever they were set; a rank that is off has no fingerprint."""
    settings = load_settings(vllm_config.additional_config)
    names = [name for name in Settings.model_fields if name not in ENV_ONLY | {"disable"}]
    return {env_name(name): getattr(settings, name) for name in names}


def _environment() -> dict[str, Any]:
    import vllm.envs as envs

    known: dict[str, Any] = envs.environment_variables
    names = [name for name in known if name.startswith(_VLLM_PREFIXES) and name not in _VLLM_EXCEPT]
    # As vLLM understands them: a variable set to its default is no difference.
    return {name: known[name]() for name in names} | {
        name: os.environ.get(name) for name in _OTHER_VARIABLES
    }


def _autotune_cache(vllm_config: Any, world_rank: int) -> str:
    """Whether this rank finds results of an earlier start, of whatever configuration."""
    from vllm.platforms import current_platform

    if (
        not vllm_config.kernel_config.enable_flashinfer_autotune
        or not current_platform.has_device_capability(90)
        or package_folder("flashinfer") is None
    ):
        return "not used"
    if not installed_release().autotunes_by_rank:
        return "not known"
    from vllm.model_executor.warmup import flashinfer_autotune_cache as stock

    name = stock.flashinfer_autotune_filename(
        vllm_config.parallel_config.data_parallel_rank, world_rank
    )
    found = any(stock.flashinfer_autotune_root().glob(f"*/{name}"))
    return "there" if found else "not there"
