"""vLLM's CUDA platform with the answers of a GPU that is not there."""

from __future__ import annotations

import os

import torch

from . import driver
from .gpus import GPUS, Gpu

driver.ensure_loaded()

from vllm.platforms.cuda import NonNvmlCudaPlatform  # noqa: E402  (needs the driver library)
from vllm.platforms.interface import DeviceCapability  # noqa: E402

GPU_ENV = "DCP_MLA_SIMULATED_GPU"


def _gpu() -> Gpu:
    return GPUS[os.environ[GPU_ENV]]


class SimulatedCudaPlatform(NonNvmlCudaPlatform):
    """Eight of the GPUs that ``DCP_MLA_SIMULATED_GPU`` names."""

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:  # noqa: D102
        return DeviceCapability(*_gpu().arch)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:  # noqa: D102
        return f"simulated {_gpu().name}"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:  # noqa: D102
        return _gpu().memory_bytes

    @classmethod
    def device_count(cls) -> int:  # noqa: D102
        return 8

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:  # noqa: D102
        return _gpu().sms

    @classmethod
    def is_integrated_gpu(cls, device_id: int = 0) -> bool:  # noqa: D102
        return False


def plugin() -> str | None:
    """A ``vllm.platform_plugins`` entry point, for processes that vLLM spawns."""
    if os.environ.get(GPU_ENV) not in GPUS:
        return None
    return f"{__name__}.{SimulatedCudaPlatform.__qualname__}"


def install() -> None:
    """Makes the simulated GPU this process's platform; before anything else of vLLM is imported."""
    import vllm.platforms

    vllm.platforms._current_platform = SimulatedCudaPlatform()
    _import_cutlass_without_memory()


def _import_cutlass_without_memory() -> None:
    """Imports the one backend module that allocates GPU memory while it is imported."""
    allocate = torch.empty
    torch.empty = lambda *args, **kwargs: allocate(*args, **{**kwargs, "device": "meta"})
    try:
        import vllm.v1.attention.backends.mla.cutlass_mla  # noqa: F401
    finally:
        torch.empty = allocate
