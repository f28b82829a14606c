"""Versions of what the package relies on."""

from __future__ import annotations

import platform
import sys

from packaging.version import InvalidVersion, Version

from ..capability_rules import MIN_FLASHINFER
from ..compat.installed import installed_version, package_folder
from ..compat.symbols import missing_symbols
from ..compat.versions import TESTED, is_tested
from ..settings import SettingsError, env_name, load_settings
from .report import Check

INSTALL_VLLM = "pip install 'vllm-dcp-mla[vllm]'"
_REINSTALL_VLLM = f"{INSTALL_VLLM}: vLLM brings it"
#: The first whose files are not those of cuda-bindings.
MIN_CUDA_PYTHON = "12.8"
_PYTHON = ((3, 11), (3, 13))


def check_versions() -> list[Check]:
    """Python, vLLM, torch, Triton, FlashInfer and its cubins."""
    return [
        _check_python(),
        _check_vllm(),
        _check_present("torch"),
        _check_present("triton"),
        _check_flashinfer(),
        _check_cubin(),
        _check_cuda_python(),
    ]


def _check_python() -> Check:
    oldest, newest = _PYTHON
    expected = f"{oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
    found = platform.python_version()
    if not oldest <= sys.version_info[:2] <= newest:
        return Check("python", "fail", found, expected, f"use a Python from {expected}")
    return Check("python", "pass", found, expected)


def _check_vllm() -> Check:
    found, expected = installed_version("vllm"), str(TESTED)
    if found is None:
        return Check("vllm", "fail", "not installed", expected, INSTALL_VLLM)
    try:
        if is_tested(found):
            return Check("vllm", "pass", found, expected)
    except InvalidVersion:
        return Check("vllm", "fail", f"{found!r} is no version", expected, INSTALL_VLLM)
    if _allows_untested():
        fix = "what fails with it may be its own; the tested range is claimed only"
        return Check("vllm", "warn", f"{found}, untested and allowed", expected, fix)
    fix = f"{INSTALL_VLLM}, or try this one with {env_name('allow_untested')}=1"
    return Check("vllm", "fail", f"{found}, untested: the plugin stays off", expected, fix)


def _allows_untested() -> bool:
    try:
        return load_settings().allow_untested
    except SettingsError:  # a check of its own
        return False


def _check_present(distribution: str) -> Check:
    found = installed_version(distribution)
    if found is None:
        return Check(distribution, "fail", "not installed", "what vLLM pins", _REINSTALL_VLLM)
    return Check(distribution, "pass", found, "what vLLM pins")


def _check_flashinfer() -> Check:
    name, oldest = "flashinfer-python", MIN_FLASHINFER
    found, expected = installed_version(name), f"what vLLM pins, {oldest} or newer"
    if found is None:
        return Check(name, "fail", "not installed", expected, _REINSTALL_VLLM)
    try:
        old = Version(found) < Version(oldest)
    except InvalidVersion:
        return Check(name, "fail", f"{found!r} is no version", expected, _REINSTALL_VLLM)
    if old:
        return Check(name, "fail", f"{found}: no LSE of sparse MLA", expected, _REINSTALL_VLLM)
    return Check(name, "pass", found, expected)


def _check_cubin() -> Check:
    name, library = "flashinfer-cubin", installed_version("flashinfer-python")
    found, expected = installed_version(name), f"none, or flashinfer-python's version: {library}"
    if found is None:
        return Check(name, "pass", "not installed", expected)
    if found != library:
        fix = f"pip install {name}=={library}" if library else f"pip uninstall {name}"
        return Check(name, "fail", f"{found}, flashinfer-python is {library}", expected, fix)
    return Check(name, "pass", found, expected)


def _check_cuda_python() -> Check:
    """Whether cuda-python and cuda-bindings, which share a folder, are of one kind.

    Before 12.8 cuda-python held the files that cuda-bindings holds since. Installed side by side
    they overwrite each other's, and an upgrade of the one removes what belongs to the other.
    """
    name, bindings = "cuda-python", installed_version("cuda-bindings")
    found = installed_version(name)
    expected = f"none, or {MIN_CUDA_PYTHON} or newer beside whole cuda-bindings"
    if found is None or bindings is None:
        return Check(name, "pass", found or "not installed", expected)
    both = f"{found} beside cuda-bindings {bindings}"
    fix = (
        f"pip install --force-reinstall --no-deps '{name}>={MIN_CUDA_PYTHON}' "
        f"cuda-bindings=={bindings}"
    )
    folder = package_folder("cuda")
    if folder is not None and not any(folder.glob("bindings/driver*")):
        return Check(name, "fail", f"{both}: cuda/bindings/driver is missing", expected, fix)
    if Version(found) < Version(MIN_CUDA_PYTHON) <= Version(bindings):
        said = f"{both}: one overwrote files of the other, and FlashInfer may not import"
        return Check(name, "warn", said, expected, fix)
    return Check(name, "pass", both, expected)


def check_symbols() -> Check:
    """Whether vLLM's source still has every name that the package is coupled to."""
    name, expected = "coupled symbols", "all of compat/symbols.py in vLLM's source"
    try:
        missing = missing_symbols()
    except (OSError, SyntaxError, ValueError) as error:
        return Check(name, "fail", f"vLLM's source cannot be read: {error}", expected, INSTALL_VLLM)
    if missing:
        return Check(name, "fail", "; ".join(missing), expected, INSTALL_VLLM)
    return Check(name, "pass", "all there", expected)
