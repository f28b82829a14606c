"""This machine's GPUs, free memory, NCCL and libraries, asked in a process of its own.

The rehearsal's own process never touches CUDA: its ranks must find the GPUs as it found them.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic import BaseModel, ConfigDict

from ..compat.installed import installed_version, package_folder
from ..compat.releases import RELEASES, installed_release

#: The oldest NCCL that lets several ranks share a GPU.
MIN_SHARING_NCCL = (2, 30)
_PROBE_SECONDS = 120
_LIBRARIES = ("vllm", "torch", "triton", "flashinfer-python", "vllm-dcp-mla")


class MachineError(RuntimeError):
    """This machine cannot run the rehearsal; the message says what is missing."""


class LocalGpu(BaseModel):
    """One GPU; bytes of its memory, of which others may use some."""

    model_config = ConfigDict(frozen=True)

    name: str
    arch: tuple[int, int]
    total_bytes: int
    free_bytes: int


class Machine(BaseModel):
    """What the ranks will find."""

    model_config = ConfigDict(frozen=True)

    gpus: tuple[LocalGpu, ...]
    nccl: tuple[int, int, int]
    versions: dict[str, str | None]


def examine() -> Machine:
    """Asks a fresh process.

    Raises:
        MachineError: vLLM, torch or a usable GPU is missing.
    """
    if package_folder("vllm") is None:
        raise MachineError("vLLM is not installed; run pip install 'vllm-dcp-mla[vllm]'.")
    if installed_release() is not RELEASES[-1]:  # its monitors and options are used
        raise MachineError(
            f"vLLM {installed_version('vllm')} is installed; a rehearsal needs "
            f"{RELEASES[-1].series} (vllm-dcp-mla selftest runs beside older ones)."
        )
    try:
        answer = subprocess.run(
            [sys.executable, "-m", __name__],
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise MachineError(
            f"torch did not find this machine's GPUs within {_PROBE_SECONDS} s; see nvidia-smi."
        ) from None
    if answer.returncode:
        last = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        raise MachineError(f"torch cannot use this machine's GPUs: {last}")
    machine = Machine.model_validate_json(answer.stdout.splitlines()[-1])
    if not machine.gpus:
        raise MachineError(
            "torch sees no GPU here; a rehearsal needs one (vllm-dcp-mla selftest needs none)."
        )
    return machine


def ranks_per_gpu(machine: Machine, ranks: int, wanted: int | None) -> int:
    """How many ranks share a GPU; 1 where there are enough GPUs.

    Args:
        machine: this machine.
        ranks: of the largest engine.
        wanted: the user's number, None for the smallest that works.

    Raises:
        MachineError: too few GPUs, or ranks must share one and NCCL cannot.
    """
    gpus = len(machine.gpus)
    share = wanted or -(-ranks // gpus)
    if share * gpus < ranks:
        raise MachineError(
            f"--ranks-per-gpu {share} leaves room for {share * gpus} ranks on {gpus} GPU(s), and "
            f"{ranks} are needed; give {-(-ranks // gpus)} or more, or auto."
        )
    if share > 1 and machine.nccl[:2] < MIN_SHARING_NCCL:
        found = ".".join(map(str, machine.nccl))
        needed = ".".join(map(str, MIN_SHARING_NCCL))
        raise MachineError(
            f"{ranks} ranks on {gpus} GPU(s) must share, and NCCL {found} refuses that; install "
            f"nvidia-nccl-cu13>={needed} and put its libnccl.so.2 into LD_PRELOAD, or use "
            f"{ranks} GPUs."
        )
    return share


def _probe() -> dict[str, Any]:
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(
            {
                "name": torch.cuda.get_device_name(index),
                "arch": torch.cuda.get_device_capability(index),
                "total_bytes": total,
                "free_bytes": free,
            }
        )
    return {
        "gpus": gpus,
        # A torch without CUDA has no NCCL; that there is no GPU says more.
        "nccl": _nccl_version() if gpus else (0, 0, 0),
        "versions": {name: _version(name) for name in _LIBRARIES},
    }


def _nccl_version() -> tuple[int, int, int]:
    """Of the library that vLLM will load: one named by its variable, else torch's or a preload."""
    number = ctypes.c_int()
    library = ctypes.CDLL(os.environ.get("VLLM_NCCL_SO_PATH") or "libnccl.so.2")
    library.ncclGetVersion(ctypes.byref(number))
    return number.value // 10_000, number.value // 100 % 100, number.value % 100


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    print(json.dumps(_probe()))
