"""FlashInfer's source against what this package passes to it; nothing of it is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from ..planner.libraries import package_folder
from .launcher_source import LAUNCHER, read_launcher
from .report import Check

_FUNCTION = "trtllm_batch_decode_with_kv_cache_mla"
_KERNEL = Path(__file__).parents[1] / "kernels" / "trtllm_gen.py"
_FIX = "install the flashinfer-python that vLLM pins"


def check_signature() -> Check:
    """Whether FlashInfer's decode function takes every argument that is passed."""
    name = "FlashInfer signature"
    required = _required_arguments()
    expected = f"{_FUNCTION} with {len(required)} arguments by name"
    folder = package_folder("flashinfer")
    if folder is None:
        return Check(name, "fail", "FlashInfer is not installed", expected, _FIX)
    for path in _candidates(folder):
        arguments = function_arguments(path, _FUNCTION)
        if arguments is None:
            continue
        missing = [argument for argument in required if argument not in arguments]
        where = path.relative_to(folder.parent)
        if missing:
            return Check(name, "fail", f"{where} lacks {', '.join(missing)}", expected, _FIX)
        return Check(name, "pass", f"all {len(required)} in {where}", expected)
    return Check(name, "fail", f"no {_FUNCTION} in {folder}", expected, _FIX)


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


def _candidates(folder: Path) -> Iterator[Path]:
    """Where the function has been, then everywhere."""
    likely = [folder / "mla" / "_core.py", folder / "mla.py", folder / "decode.py"]
    yield from likely
    yield from (path for path in sorted(folder.rglob("*.py")) if path not in likely)


def function_arguments(path: Path, function: str) -> list[str] | None:
    """Argument names of a function that a file defines at its top, None when it does not."""
    try:
        source = path.read_bytes()
        if f"def {function}".encode() not in source:
            return None
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            a = node.args
            return [argument.arg for argument in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return None


def _required_arguments() -> tuple[str, ...]:
    """``REQUIRED_ARGUMENTS`` of our kernel, off its source: importing it would import torch."""
    for node in ast.parse(_KERNEL.read_bytes()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "REQUIRED_ARGUMENTS":
            return tuple(ast.literal_eval(node.value))
    raise LookupError(f"{_KERNEL} has no REQUIRED_ARGUMENTS")
