"""This machine: what it is, and what its memory and matrix units do at best."""

from __future__ import annotations

import os
import platform
import statistics
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from .floor import Ceilings

_LIBRARIES = ("vllm-dcp-mla", "vllm", "torch", "triton", "flashinfer-python")
_COPY_BYTES = 1 << 31
_PRODUCT = 8192
_REPEATS = 20


def describe(device: torch.device) -> dict[str, Any]:
    """The machine's parts and the libraries' versions."""
    said: dict[str, Any] = {
        "cpu_cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _LIBRARIES},
        "gpu": None,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        said |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "memory_bytes": properties.total_memory,
        }
    return said


def measure_ceilings(device: torch.device) -> Ceilings:
    """A large copy and a large bf16 product, on random data."""
    return Ceilings(2 * _COPY_BYTES / _copy_us(device), 2 * _PRODUCT**3 / _product_us(device))


def _copy_us(device: torch.device) -> float:
    source = torch.randint(-128, 127, (_COPY_BYTES,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return _median_us(lambda: target.copy_(source))


def _product_us(device: torch.device) -> float:
    left, right = (
        torch.randn(_PRODUCT, _PRODUCT, dtype=torch.bfloat16, device=device) for _ in range(2)
    )
    return _median_us(lambda: torch.matmul(left, right))


def _median_us(work: Any) -> float:
    for _ in range(3):
        work()
    cuda: Any = torch.cuda
    times = []
    for _ in range(_REPEATS):
        start, stop = (cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(times)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
