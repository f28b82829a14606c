"""The kernel that turns global lengths into those of a rank's shard: one launch.

Stock does it with ten operations of torch, each a launch, in the metadata of every decode step;
with vLLM 0.29 the host waits for the GPU besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.triton_utils import tl, triton

from ..compat.adapter import load_adapter

_BLOCK = 1024
_POINTERS = ("lengths_ptr", "local_ptr")
_INTEGERS = ("count", "dcp_rank", "dcp_world", "interleave")


@triton.jit
def local_length(length, dcp_rank, dcp_world, interleave):  # type: ignore[no-untyped-def]
    """:func:`..topology.local_seq_len`."""
    rounds = length // (interleave * dcp_world)
    rest = length - rounds * interleave * dcp_world - dcp_rank * interleave
    return rounds * interleave + tl.minimum(tl.maximum(rest, 0), interleave)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_POINTERS
)
def _local_lengths_kernel(  # type: ignore[no-untyped-def]
    lengths_ptr,
    local_ptr,
    count,
    dcp_rank,
    dcp_world,
    interleave,
    BLOCK: tl.constexpr,  # noqa: N803
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lengths_ptr + at, mask=at < count, other=0)
    local = local_length(length, dcp_rank, dcp_world, interleave)
    tl.store(local_ptr + at, local, mask=at < count)


_STOCK: Any = load_adapter()


class LocalLengthsKernel(_STOCK.TritonJitKernel):
    """The kernel as vLLM warms it."""

    kernel = _local_lengths_kernel

    @dataclass(frozen=True)
    class CompileKey:
        """What a variant is compiled for: nothing."""

    def dispatch(self) -> CompileKey:
        """The variant."""
        return self.CompileKey()

    def get_warmup_keys(self) -> list[CompileKey]:
        """The one variant."""
        return [self.dispatch()]

    def warmup_inputs(self, compile_key: CompileKey) -> dict[str, Any]:
        """Any inputs."""
        pointer = _STOCK.TritonWarmupTensor(torch.int32)
        return {"lengths": pointer, "local": pointer, **dict.fromkeys(_INTEGERS, 2)}

    @_STOCK.kernel_launcher  # type: ignore[untyped-decorator]
    def __call__(
        self,
        lengths: torch.Tensor,
        local: torch.Tensor,
        count: int,
        dcp_rank: int,
        dcp_world: int,
        interleave: int,
    ) -> Any:
        """See :func:`write_local_lengths`."""
        return (triton.cdiv(count, _BLOCK),), {"BLOCK": _BLOCK}


LOCAL_LENGTHS_KERNEL = LocalLengthsKernel()


def write_local_lengths(
    lengths: torch.Tensor, local: torch.Tensor, *, rank: int, dcp: int, interleave: int
) -> None:
    """:func:`.lengths.local_lengths`, written.

    Args:
        lengths: global lengths of any shape, int32, without gaps.
        local: of the same shape, written; may be ``lengths``.
        rank: the rank that stores the shard.
        dcp: ranks that share a request.
        interleave: tokens a rank stores before the next takes over.
    """
    assert lengths.dtype == local.dtype == torch.int32
    assert lengths.is_contiguous() and local.is_contiguous()  # noqa: PT018
    assert lengths.shape == local.shape
    if lengths.numel():
        LOCAL_LENGTHS_KERNEL(lengths, local, lengths.numel(), rank, dcp, interleave)
