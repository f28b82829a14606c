"""What surrounds the attention kernel in a step on SM100: launches and bytes, ours and stock's.

Both implementations run their own code on tensors without memory (``meta``), with the kernel call
replaced by one that counts. The conversion of indices before it is the same function in both and is
left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch

from ...kernels.base import LaunchBuffers, LaunchShape, SparseMlaBatch
from ...merge import LseBase
from ...workspace import DEFAULT_SLAB_LIMIT_BYTES, plan_workspace
from ..counting import CountedOperations
from ..inputs import DIMS, HEAD_DIM, TOPK
from ..rows import Row
from ..workbench import Workbench

HEADS = 64
TOKENS = (1, 64, 8192, 32_768)
_ROWS = 4096
_BLOCK = 64
_META = torch.device("meta")


def run(workbench: Workbench) -> Iterator[Row]:
    """Rows of both at every number of tokens."""
    for tokens in TOKENS[:2] if workbench.quick else TOKENS:
        for provider, count in (("vllm_dcp_mla", count_ours), ("stock", count_stock)):
            counted = count(tokens)
            yield Row(
                "launches",
                f"{tokens:,} tokens, {HEADS} heads, bf16",
                provider,
                sizes={"tokens": tokens, "heads": HEADS},
                counted={
                    "launches": counted.launches,
                    "bytes_around_kernel": counted.bytes,
                    "workspace_bytes": workspace_bytes(provider, tokens),
                },
            )


class _CountingKernel:
    """trtllm-gen's place."""

    name: ClassVar[str] = "counts"
    lse_base: ClassVar[LseBase] = "2"
    clears_empty_rows: ClassVar[bool] = False

    def __init__(self, counted: CountedOperations) -> None:
        self._counted = counted

    def supports(self, shape: LaunchShape) -> str | None:
        """Any shape."""
        return None

    def launch(self, batch: SparseMlaBatch, buffers: LaunchBuffers) -> None:
        """Counts a launch; its bytes are the same on both sides and are not."""
        self._counted.note()


def count_ours(tokens: int) -> CountedOperations:
    """This package's implementation, from the kernel's inputs to what the merge takes."""
    from ...backends.trtllm import SplitLaunchImpl

    counted = CountedOperations()
    impl: Any = object.__new__(SplitLaunchImpl)
    impl.kv_cache_dtype = "bfloat16"
    impl.scale = 1.0
    impl.need_to_return_lse_for_decode = True
    impl._dims = DIMS
    impl._kernel = _CountingKernel(counted)
    impl._plans = {HEADS: plan_workspace(HEADS, max(tokens, 1))}
    nothing = torch.empty(0, dtype=torch.int8, device=_META)
    impl._buffers = LaunchBuffers(nothing, nothing)
    query, cache, topk, counts = _inputs(tokens)
    with counted:
        impl._attend(query, cache, topk, counts, SimpleNamespace(), _BLOCK)
    return counted


def count_stock(tokens: int) -> CountedOperations:
    """vLLM's implementation, likewise."""
    from vllm.v1.attention.backends.mla.flashinfer_mla_sparse import FlashInferMLASparseImpl

    counted = CountedOperations()
    impl: Any = object.__new__(FlashInferMLASparseImpl)
    impl.need_to_return_lse_for_decode = True
    impl.is_nope_mla = False
    impl.index_group = None
    impl.qk_nope_head_dim, impl.qk_rope_head_dim = DIMS.qk_nope_head_dim, DIMS.qk_rope_head_dim
    impl.kv_lora_rank = DIMS.kv_lora_rank
    impl._workspace_buffer = torch.empty(0, dtype=torch.int8, device=_META)
    impl.bmm1_scale = impl.bmm2_scale = 1.0
    impl._prepare_mqa_kernel = lambda layer, device: None
    query, cache, topk, counts = _inputs(tokens)

    def decode(**arguments: Any) -> Any:
        counted.note()
        out = torch.empty(tokens, 1, HEADS, 512, dtype=torch.bfloat16, device=_META)
        return out, torch.empty(tokens, HEADS, device=_META)

    flashinfer = ModuleType("flashinfer.decode")
    flashinfer.trtllm_batch_decode_with_kv_cache_mla = decode  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {"flashinfer.decode": flashinfer}), counted:
        impl._forward_mqa_kernel(
            *(query, cache, topk, counts),
            layer=SimpleNamespace(),
            block_size=_BLOCK,
            is_decode=True,
        )
    return counted


def workspace_bytes(provider: str, tokens: int) -> int:
    """Bytes of the attention workspace of a rank whose largest step has so many tokens."""
    from ...workspace import stock_workspace_bytes

    if provider == "stock":
        return stock_workspace_bytes(HEADS // 8, 8, tokens)
    return plan_workspace(HEADS, tokens, slab_limit_bytes=DEFAULT_SLAB_LIMIT_BYTES).total_bytes


def _inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.empty(tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=_META),
        torch.empty(_ROWS // _BLOCK, _BLOCK, HEAD_DIM, dtype=torch.bfloat16, device=_META),
        torch.empty(tokens, TOPK, dtype=torch.int32, device=_META),
        torch.empty(tokens, dtype=torch.int32, device=_META),
    )
