"""Attention kernels behind one protocol, one a file, each imported when it is asked for."""

from __future__ import annotations

from typing import get_args

from ..settings import KernelName
from .base import SparseMlaKernel


def load_kernel(name: KernelName, *, num_sms: int = 1, rows: int | None = None) -> SparseMlaKernel:
    """Makes a kernel by its name.

    Args:
        name: of the kernel.
        num_sms: multiprocessors of the GPU, for kernels that plan with them.
        rows: keys that a token is expected to have here, likewise; None for all of its top-k.

    Raises:
        ImportError: the library behind it is missing or lacks what is relied on.
        ValueError: no kernel has that name.
    """
    if name == "trtllm_gen":
        from .trtllm_gen import TrtllmGenKernel

        return TrtllmGenKernel()
    if name == "flashmla":
        from .flashmla import FlashMlaKernel

        return FlashMlaKernel(num_sms, rows)
    if name == "flash_attn3":
        from .flash_attn3 import FlashAttn3Kernel

        return FlashAttn3Kernel()
    if name == "triton_decode":
        from .triton_decode import TritonDecodeKernel

        return TritonDecodeKernel(num_sms, rows)
    if name == "reference":
        from .reference import ReferenceKernel

        return ReferenceKernel()
    raise ValueError(f"kernel is {name!r}; known: {', '.join(get_args(KernelName))}")
