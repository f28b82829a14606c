"""The hooks into the installed series of vLLM.

An adapter module has

- ``KernelHook``, mixed into an implementation: hands what stock hands its kernel to ``_attend``;
- ``IndexerHook``, mixed into the indexer's builder: hands the splitting of prefills to
  ``split_prefills``;
- ``ABSENT_CHUNK_FIELDS``, fields of a prefill chunk's metadata that the series does not have;
- ``TritonJitKernel``, ``TritonWarmupTensor`` and ``kernel_launcher`` of its JIT warm-up;
- ``install_indexer_hooks``, for what no subclass reaches.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .releases import installed_release


def load_adapter() -> Any:
    """The adapter module; importing it imports vLLM."""
    return import_module(f".{installed_release().adapter}", __package__)
