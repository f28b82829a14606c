"""A stand-in for the CUDA driver, for machines without one.

vLLM's extension modules are linked with ``libcuda.so.1`` and do not import without it. None of its
functions is called as long as nothing runs on a GPU.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path

LIBRARY = "libcuda.so.1"
#: What vLLM's extension modules import from the driver.
_FUNCTIONS = (
    *("cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGetAttribute"),
    *("cuDevicePrimaryCtxRetain", "cuCtxGetCurrent", "cuCtxSetCurrent", "cuGetErrorString"),
    *("cuGetProcAddress_v2", "cuMemAddressFree", "cuMemAddressReserve", "cuMemCreate"),
    *("cuMemGetAllocationGranularity", "cuMemMap", "cuMemRelease", "cuMemSetAccess", "cuMemUnmap"),
    *("cuPointerGetAttribute", "cuTensorMapEncodeTiled"),
)
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


class DriverStandInError(RuntimeError):
    """There is neither a CUDA driver nor a way to make a stand-in."""


def is_installed() -> bool:
    """Whether this machine has a CUDA driver library."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def build(folder: Path) -> Path:
    """Compiles the stand-in into ``folder``; its path, for ``LD_LIBRARY_PATH`` or ``load``.

    Raises:
        DriverStandInError: no C compiler, or it failed.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise DriverStandInError(
            f"{LIBRARY} is not on this machine and there is no C compiler to make a stand-in with; "
            "install one (Debian: apt-get install gcc) or run this where the GPU is."
        )
    source = "\n".join(f"int {name}(void) {{ return {_NO_DEVICE}; }}" for name in _FUNCTIONS)
    target = folder / LIBRARY
    done = subprocess.run(
        [compiler, "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}", "-x", "c", "-", "-o", str(target)],
        input=source,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise DriverStandInError(f"{compiler} could not make {target}: {done.stderr.strip()}")
    return target


def ensure_loaded() -> None:
    """Loads the driver, or a stand-in for it, into this process; before vLLM is imported.

    Raises:
        DriverStandInError: neither is to be had.
    """
    if is_installed():
        return
    with tempfile.TemporaryDirectory() as folder:
        # Loaded under its soname, it satisfies every later module that is linked with it.
        ctypes.CDLL(str(build(Path(folder))), mode=ctypes.RTLD_GLOBAL)
