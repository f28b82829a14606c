"""Which kernel each launch of a layer takes on Hopper: made from shapes, kept by them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from vllm.logger import init_logger

from ..kernel_choice import kernels_by_tokens
from ..kernels import load_kernel
from ..kernels.base import LaunchShape, SparseMlaKernel
from ..key_splits import ANY
from ..settings import KernelChoice, KernelName

logger = init_logger("vllm.dcp_mla.hopper")

#: Kernels of libraries that vLLM ships, which serve some launches better than ours.
_SHIPPED: tuple[KernelName, ...] = ("flashmla", "flash_attn3")
OURS: KernelName = "triton_decode"


@dataclass(frozen=True, slots=True)
class Kernels:
    """The most tokens of a launch that a kernel is for, rising, and the kernel."""

    by_tokens: tuple[tuple[int, SparseMlaKernel], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of all, each once."""
        return tuple(dict.fromkeys(kernel.name for _, kernel in self.by_tokens))

    def of(self, tokens: int) -> SparseMlaKernel:
        """The kernel of a launch of so many tokens."""
        return next(kernel for most, kernel in self.by_tokens if tokens <= most)


@dataclass(frozen=True, slots=True)
class KernelTable:
    """The kernels of a layer's launches.

    Attributes:
        shape: of the launches, but for heads and dtype.
        forced: the only kernel to use, or ``auto``.
        num_sms: multiprocessors.
    """

    shape: LaunchShape
    forced: KernelChoice
    num_sms: int
    _found: dict[tuple[int, int, torch.dtype], Kernels] = field(default_factory=dict)

    def at(self, heads: int, rows: int, dtype: torch.dtype) -> Kernels:
        """The kernels of launches.

        Args:
            heads: query heads.
            rows: keys that a token is expected to have.
            dtype: of the keys.

        Raises:
            ValueError: the forced kernel does not take the shape.
        """
        key = (heads, rows, dtype)
        if key not in self._found:
            shape = replace(self.shape, heads=heads, cache_dtype=dtype)
            self._found[key] = choose_kernels(shape, self.forced, self.num_sms, rows)
        return self._found[key]


def choose_kernels(shape: LaunchShape, forced: KernelChoice, num_sms: int, rows: int) -> Kernels:
    """The kernels of launches of a shape.

    Args:
        shape: of the launches.
        forced: the only kernel to use, or ``auto``.
        num_sms: multiprocessors.
        rows: keys that a token is expected to have.

    Raises:
        ValueError: the forced kernel does not take the shape.
    """
    if forced != "auto":
        kernel = load_kernel(forced, num_sms=num_sms, rows=rows)
        if (reason := kernel.supports(shape)) is not None:
            raise ValueError(f"The forced kernel {forced} does not serve this model: {reason}.")
        return Kernels(((ANY, kernel),))
    found: dict[str, SparseMlaKernel] = {OURS: load_kernel(OURS, num_sms=num_sms, rows=rows)}
    for name in _SHIPPED:
        try:
            kernel = load_kernel(name, num_sms=num_sms, rows=rows)
        except ImportError as error:
            logger.info_once("Not used: %s", str(error))
            continue
        if kernel.supports(shape) is None:
            found[name] = kernel
    chosen = kernels_by_tokens(shape.heads, rows, found)
    return Kernels(tuple((tokens, found[name]) for tokens, name in chosen))
