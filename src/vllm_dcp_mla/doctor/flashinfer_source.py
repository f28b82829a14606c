"""FlashInfer's source against what this package passes to it; nothing of it is imported."""

from __future__ import annotations

from ..compat.flashinfer import FUNCTION, REQUIRED_ARGUMENTS, read_signature
from ..compat.installed import package_folder
from .launcher_source import LAUNCHER, read_launcher
from .report import Check

_FIX = "install the flashinfer-python that vLLM pins"


def check_signature() -> Check:
    """Whether FlashInfer's decode function takes every argument that is passed."""
    name = "FlashInfer signature"
    expected = f"{FUNCTION} with {len(REQUIRED_ARGUMENTS)} arguments by name"
    folder = package_folder("flashinfer")
    if folder is None:
        return Check(name, "fail", "FlashInfer is not installed", expected, _FIX)
    signature = read_signature(folder)
    if signature is None:
        return Check(name, "fail", f"no {FUNCTION} in {folder}", expected, _FIX)
    where = signature.path.relative_to(folder.parent)
    if signature.missing:
        return Check(name, "fail", f"{where} lacks {', '.join(signature.missing)}", expected, _FIX)
    return Check(name, "pass", f"all {len(REQUIRED_ARGUMENTS)} in {where}", expected)


def check_launcher() -> Check:
    """Whether FlashInfer's launcher sizes its workspace as :mod:`..workspace` plans it."""
    name, expected = "FlashInfer launcher", "the sizing that launches are split by"
    folder = package_folder("flashinfer")
    if folder is None:
        return Check(name, "fail", "FlashInfer is not installed", expected, _FIX)
    try:
        source = (folder / LAUNCHER).read_text(errors="replace")
    except OSError as error:
        found = f"{LAUNCHER} cannot be read: {error.strerror}"
        return Check(name, "warn", found, expected, _FIX)
    differences = read_launcher(source)
    if differences:
        return Check(name, "fail", "; ".join(map(str, differences)), expected, _FIX)
    return Check(name, "pass", "slab, guard, scratch and counters as planned", expected)
