"""The one FlashInfer function relied on, checked in its source text; nothing of it is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FUNCTION = "trtllm_batch_decode_with_kv_cache_mla"
#: Arguments that every call passes, by name.
REQUIRED_ARGUMENTS = (
    *("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len"),
    *("qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim", "sparse_mla_top_k"),
    *("bmm1_scale", "bmm2_scale", "backend", "out", "lse", "return_lse"),
)
#: Where the function has been defined, newest first.
_FILES = ("mla/_core.py", "mla.py", "decode.py")


@dataclass(frozen=True, slots=True)
class Signature:
    """The function as installed.

    Attributes:
        path: the file that defines it.
        missing: arguments of :data:`REQUIRED_ARGUMENTS` that it lacks.
    """

    path: Path
    missing: tuple[str, ...]


def read_signature(package: Path) -> Signature | None:
    """Finds the function below an installed ``flashinfer`` folder, None when it is not there."""
    for path in _candidates(package):
        arguments = _arguments(path)
        if arguments is not None:
            missing = tuple(name for name in REQUIRED_ARGUMENTS if name not in arguments)
            return Signature(path, missing)
    return None


def _candidates(package: Path) -> Iterator[Path]:
    likely = [package / name for name in _FILES]
    yield from likely
    yield from (path for path in sorted(package.rglob("*.py")) if path not in likely)


def _arguments(path: Path) -> list[str] | None:
    """Argument names of the function, None when the file does not define it."""
    try:
        source = path.read_text(errors="replace")
    except OSError:
        return None
    start = source.find(f"def {FUNCTION}(")
    if start < 0:
        return None
    # Only its head is parsed: the file is long, and this runs in every vLLM process.
    depth = 0
    for end in range(source.index("(", start), len(source)):
        depth += {"(": 1, ")": -1}.get(source[end], 0)
        if depth == 0:
            break
    try:
        (node,) = ast.parse(f"{source[start : end + 1]}: pass").body
    except SyntaxError:
        return None
    assert isinstance(node, ast.FunctionDef)
    a = node.args
    return [argument.arg for argument in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
