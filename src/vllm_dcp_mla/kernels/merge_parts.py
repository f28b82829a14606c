"""Merges the parts of each token's keys by their log-sum-exp (LSE): the launch after the attention.

The parts are float32 with an LSE to base 2, as our kernel leaves them, or bf16 with a natural LSE,
as libraries do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.warmup.jit_warmup import kernel_launcher
from vllm.model_executor.warmup.jit_warmup_triton_helper import (
    TritonWarmupTensor,
    VllmTritonJitKernel,
)

from ..key_splits import MAX_SPLITS
from .base import MlaDims
from .triton_bodies import MERGE_INTEGERS, MERGE_POINTERS, merge_kernel


@dataclass(frozen=True)
class _Variant:
    """How parts of a dtype are merged.

    Attributes:
        lse_unit: what their LSE is to base 2.
        at_once: parts that a program reads at a time.
        warps: of a program. With 4, 64 tokens of 2 bf16 parts took 26 us on an H200, with one 5.
    """

    lse_unit: float
    at_once: int
    warps: int


_VARIANTS = {
    torch.float32: _Variant(lse_unit=1.0, at_once=8, warps=4),
    torch.bfloat16: _Variant(lse_unit=1 / math.log(2.0), at_once=4, warps=1),
}


class _MergeKernel(VllmTritonJitKernel["_MergeKernel.CompileKey"]):
    """The kernel as vLLM warms it."""

    kernel = merge_kernel
    bind_launch_inputs = False

    @dataclass(frozen=True)
    class CompileKey:
        """What a variant is compiled for."""

        latent_dim: int
        partial_dtype: torch.dtype
        block_keys: int

    def get_warmup_keys(
        self, dims: MlaDims, partial_dtype: torch.dtype, block_keys: int
    ) -> list[CompileKey]:
        """All variants of parts of a dtype, of whole blocks of ``block_keys`` keys: one."""
        return [self.CompileKey(dims.kv_lora_rank, partial_dtype, block_keys)]

    def warmup_inputs(self, compile_key: CompileKey) -> dict[str, Any]:
        """Any inputs: of them the parts' dtype alone is in the key."""
        dtypes = {
            "out_ptr": torch.bfloat16,
            "counts_ptr": torch.int32,
            "partial_out_ptr": compile_key.partial_dtype,
        }
        return {
            **{p: TritonWarmupTensor(dtypes.get(p, torch.float32)) for p in MERGE_POINTERS},
            **dict.fromkeys(MERGE_INTEGERS, 2),
            "latent_dim": compile_key.latent_dim,
            "block_keys": compile_key.block_keys,
            "num_blocks": 1,
        }

    @kernel_launcher  # type: ignore[untyped-decorator]
    def __call__(
        self, *, latent_dim: int, block_keys: int, num_blocks: int, **arguments: Any
    ) -> Any:
        variant = _VARIANTS[arguments["partial_out_ptr"].dtype]
        return (num_blocks,), {
            **arguments,
            "LATENT": latent_dim,
            "LSE_UNIT": variant.lse_unit,
            "BLOCK_N": block_keys,
            "BLOCK_S": variant.at_once,
            "MAX_S": MAX_SPLITS,
            "num_warps": variant.warps,
        }


MERGE_KERNEL = _MergeKernel()
