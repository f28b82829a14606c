"""The names that vLLM's backend registry points at: ours under DCP, stock's otherwise.

vLLM resolves a backend by importing a module and reading a name off it, within the configuration of
the layer that asks. Answering that read here keeps a dcp = 1 engine on stock's own classes. vLLM
keeps selections for the life of a process, apart by whether DCP is on: two engines of one process
that differ in this package's settings alone share the first one's.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..indexer import hooks

_STOCK = "vllm.v1.attention.backends.mla"
_OURS = "vllm_dcp_mla.backends"

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
    "FlashMLASparse": (
        (f"{_STOCK}.flashmla_sparse", "FlashMLASparseBackend"),
        (f"{_OURS}.flashmla", "DcpFlashMLASparseBackend"),
    ),
}
#: The alias is the class of this GPU; SM100 is the one there is.
_CLASSES["DcpMlaSparse"] = _CLASSES["FlashInferMLASparse"]


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    stock, ours = _CLASSES[name]
    if not _serves():
        return getattr(import_module(stock[0]), stock[1])
    # The indexer's builder is asked for after the model has loaded, and a backend is selected
    # before the first layer is made: early enough.
    hooks.install()
    return getattr(import_module(ours[0]), ours[1])


def _serves() -> bool:
    from vllm.config import get_current_vllm_config_or_none

    from ..settings import load_settings

    config = get_current_vllm_config_or_none()
    if config is None:
        return True
    settings = load_settings(config.additional_config)
    if settings.disable:
        return False
    dcp = config.parallel_config.decode_context_parallel_size
    return dcp > 1 or settings.kernel == "reference"
