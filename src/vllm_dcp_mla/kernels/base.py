"""What a sparse MLA kernel gets, and what it promises.

Shapes: T tokens, H query heads, D = kv_lora_rank + qk_rope_head_dim, V = kv_lora_rank, K top-k
slots. Each token attends the first ``counts[t]`` entries of its row of ``topk``, which are physical
rows of the cache; entries behind are not read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch

from ..merge import LseBase
from ..settings import KernelName

_ALIGNMENT = 16  # bytes; rows are read and written in pieces of this size


@dataclass(frozen=True, slots=True)
class MlaDims:
    """MLA head dims of a model, in elements."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int

    @property
    def is_nope(self) -> bool:
        """Whether the model has no rotary part; its kernel forbids rows without tokens."""
        return self.qk_rope_head_dim == 0


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """What all launches of a layer have in common.

    Attributes:
        heads: query heads.
        topk: K.
        cache_dtype: of the cache's rows.
        dims: the model's MLA dims.
    """

    heads: int
    topk: int
    cache_dtype: torch.dtype
    dims: MlaDims


@dataclass(frozen=True, slots=True)
class SparseMlaBatch:
    """Tokens to attend, and where the results go.

    Attributes:
        query: ``[T, H, D]``, of the cache's dtype, or bf16 where the kernel takes it.
        cache_rows: ``[R, D]`` view of the paged cache; bf16, fp16 or float8_e4m3fn.
        page_size: rows of a page; divides R.
        topk: ``[T, K]`` int32 rows of ``cache_rows``, valid ones first.
        counts: ``[T]`` int32, valid entries of each row of ``topk``.
        softmax_scale: the model's scale of query-key products.
        query_scale: value of one unit of ``query``; 1 unless quantised.
        cache_scale: value of one unit of ``cache_rows``; 1 unless quantised.
        dims: the model's MLA dims.
        out: ``[T, H, V]`` bf16, to be written.
        lse: ``[T, H]`` float32, to be written; None when it is not wanted.
    """

    query: torch.Tensor
    cache_rows: torch.Tensor
    page_size: int
    topk: torch.Tensor
    counts: torch.Tensor
    softmax_scale: float
    query_scale: float
    cache_scale: float
    dims: MlaDims
    out: torch.Tensor
    lse: torch.Tensor | None

    def tokens(self, rows: slice) -> SparseMlaBatch:
        """The same for some tokens only; results land in the same memory."""
        return replace(
            self,
            query=self.query[rows],
            topk=self.topk[rows],
            counts=self.counts[rows],
            out=self.out[rows],
            lse=None if self.lse is None else self.lse[rows],
        )


@dataclass(frozen=True, slots=True)
class LaunchBuffers:
    """Memory a launch may use, shared by all launches of a device in stream order.

    Attributes:
        workspace: int8; trtllm-gen's is zero before its first use.
        counters: uint8, zero before its first use; kernels leave it zero.
    """

    workspace: torch.Tensor
    counters: torch.Tensor


class SparseMlaKernel(Protocol):
    """One attention kernel."""

    name: ClassVar[KernelName]
    #: Base of the LSE it writes.
    lse_base: ClassVar[LseBase]
    #: Whether rows whose count is 0 leave it as (0, -inf); elsewhere they may be left as they were.
    clears_empty_rows: ClassVar[bool]

    def supports(self, shape: LaunchShape) -> str | None:
        """Why it does not take launches of a shape, None when it does."""
        ...

    def launch(self, batch: SparseMlaBatch, buffers: LaunchBuffers) -> None:
        """Writes ``batch.out`` and, where wanted, ``batch.lse``, in place.

        Raises:
            ValueError: a batch that this kernel does not serve.
        """
        ...


def refuse_unaligned(batch: SparseMlaBatch) -> None:
    """Checks what Triton kernels are told to rely on: bf16 queries, pieces of 16 bytes.

    Raises:
        ValueError: memory that is not aligned, or a query that is not bf16.
    """
    if batch.query.dtype != torch.bfloat16:
        raise ValueError(f"query is {batch.query.dtype}; the kernel takes torch.bfloat16")
    for name in ("query", "cache_rows", "out"):
        tensor = getattr(batch, name)
        bytes_apart = [s * tensor.element_size() for s in tensor.stride()[:-1]]
        if tensor.stride(-1) != 1 or any(n % _ALIGNMENT for n in (tensor.data_ptr(), *bytes_apart)):
            raise ValueError(
                f"{name} lies at {tensor.data_ptr():#x} with strides of {bytes_apart} bytes; "
                f"the kernel needs multiples of {_ALIGNMENT}, and rows without gaps"
            )
