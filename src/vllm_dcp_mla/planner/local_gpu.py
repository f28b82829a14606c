"""This machine's first GPU, asked of the CUDA driver itself: needs no torch, makes no context."""

from __future__ import annotations

import ctypes
from pathlib import Path

from ..simulate.gpus import Gpu

_LIBRARY = "libcuda.so.1"
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")
# CUdevice_attribute
_MULTIPROCESSORS = 16
_CAPABILITY_MAJOR = 75
_CAPABILITY_MINOR = 76
_NAME_BYTES = 256


class NoGpuError(RuntimeError):
    """There is no usable GPU; the message says what the driver answered."""


def detect() -> Gpu:
    """The first GPU that ``CUDA_VISIBLE_DEVICES`` leaves.

    Raises:
        NoGpuError: no driver, or it shows no device.
    """
    try:
        cuda = ctypes.CDLL(_LIBRARY)
    except OSError:
        raise NoGpuError(f"no NVIDIA driver ({_LIBRARY}) is on this machine") from None
    device = ctypes.c_int()
    _call(cuda, "cuInit", 0)
    _call(cuda, "cuDeviceGet", ctypes.byref(device), 0)
    name = ctypes.create_string_buffer(_NAME_BYTES)
    _call(cuda, "cuDeviceGetName", name, _NAME_BYTES, device)
    memory = ctypes.c_size_t()
    _call(cuda, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    return Gpu(
        name=name.value.decode(errors="replace"),
        arch=(
            _attribute(cuda, _CAPABILITY_MAJOR, device),
            _attribute(cuda, _CAPABILITY_MINOR, device),
        ),
        sms=_attribute(cuda, _MULTIPROCESSORS, device),
        memory_bytes=memory.value,
    )


def kernel_module() -> str | None:
    """The first line of the driver's own version file, None without a driver."""
    try:
        return _KERNEL_MODULE.read_text(errors="replace").splitlines()[0]
    except (OSError, IndexError):
        return None


def _attribute(cuda: ctypes.CDLL, attribute: int, device: ctypes.c_int) -> int:
    value = ctypes.c_int()
    _call(cuda, "cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
    return value.value


def _call(cuda: ctypes.CDLL, function: str, *arguments: object) -> None:
    status = getattr(cuda, function)(*arguments)
    if status:
        raise NoGpuError(f"the NVIDIA driver shows no GPU ({function} returned error {status})")
