"""Attention kernels behind one protocol, one a file, each imported when it is asked for."""

from __future__ import annotations

from .base import SparseMlaKernel


def load_kernel(name: str) -> SparseMlaKernel:
    """Makes a kernel by its name.

    Raises:
        ImportError: the library behind it is missing or lacks what is relied on.
        ValueError: no kernel has that name.
    """
    if name == "trtllm_gen":
        from .trtllm_gen import TrtllmGenKernel

        return TrtllmGenKernel()
    if name == "reference":
        from .reference import ReferenceKernel

        return ReferenceKernel()
    raise ValueError(f"kernel is {name!r}; known: trtllm_gen, reference")
