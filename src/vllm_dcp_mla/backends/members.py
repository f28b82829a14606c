"""The names that vLLM's backend registry points at: ours under DCP, stock's otherwise.

vLLM resolves a backend by importing a module and reading a name off it, within the configuration of
the layer that asks. Answering that read here keeps a dcp = 1 engine on stock's own classes. vLLM
keeps selections for the life of a process, apart by whether DCP is on: two engines of one process
that differ in this package's settings alone share the first one's.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..capability import FLASH_ATTN_3, row
from ..compat.releases import installed_release
from ..indexer import hooks
from ..settings import Settings, load_settings

_STOCK = "vllm.v1.attention.backends.mla"
_OURS = "vllm_dcp_mla.backends"

ALIAS = "DcpMlaSparse"
#: Name here: (stock class, our class), as module and class name.
_CLASSES = {
    "FlashInferMLASparse": (
        (f"{_STOCK}.flashinfer_mla_sparse", "FlashInferMLASparseTRTLLMBackend"),
        (f"{_OURS}.trtllm", "DcpFlashInferMLASparseBackend"),
    ),
    "FlashAttnMLASparseFA4": (
        (f"{_STOCK}.flashattn_mla_sparse", "FlashAttnMLASparseFA4Backend"),
        (f"{_OURS}.flash_attn_4", "DcpFlashAttnMLASparseFA4Backend"),
    ),
    "FlashAttnMLASparse": (
        (f"{_STOCK}.flashattn_mla_sparse", "FlashAttnMLASparseBackend"),
        (f"{_OURS}.hopper", "DcpFlashAttnMLASparseBackend"),
    ),
    "FlashMLASparse": (
        (f"{_STOCK}.flashmla_sparse", "FlashMLASparseBackend"),
        (f"{_OURS}.flashmla", "DcpFlashMLASparseBackend"),
    ),
}
#: Those that the reference kernel serves without DCP too.
_WITH_REFERENCE = ("FlashInferMLASparse", "FlashAttnMLASparseFA4")


def __getattr__(name: str) -> Any:
    if name != ALIAS and name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    settings, dcp = _engine()
    if name == ALIAS:
        name = _of_this_gpu(settings)
    stock, ours = _CLASSES[name]
    forced = settings.kernel == "reference" and name in _WITH_REFERENCE
    if settings.disable or not (dcp > 1 or forced):
        return getattr(import_module(stock[0]), stock[1])
    # The indexer's builder is asked for after the model has loaded, and a backend is selected
    # before the first layer is made: early enough.
    hooks.install()
    return getattr(import_module(ours[0]), ours[1])


def _engine() -> tuple[Settings, int]:
    """The settings and the DCP size of the current engine; with none, as with DCP."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is None:
        return load_settings(), 2
    settings = load_settings(config.additional_config)
    return settings, config.parallel_config.decode_context_parallel_size


def _of_this_gpu(settings: Settings) -> str:
    """The member that the alias stands for: the forced kernel's, else this GPU's."""
    if FLASH_ATTN_3 in installed_release().left_to_stock:
        return "FlashInferMLASparse"
    if settings.kernel != "auto":
        hopper = settings.kernel in row(FLASH_ATTN_3).kernels
    else:
        import vllm.platforms

        capability = vllm.platforms.current_platform.get_device_capability()
        hopper = capability is not None and capability.major == 9
    return "FlashAttnMLASparse" if hopper else "FlashInferMLASparse"
