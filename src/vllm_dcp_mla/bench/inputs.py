"""Random inputs of attention launches, on real shapes, with traps where nothing may be read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from ..kernels.base import MlaDims, SparseMlaBatch

#: GLM-5.2's; DeepSeek-V3.2's latent and rotary parts are the same.
DIMS = MlaDims(512, 192, 64)
HEAD_DIM = DIMS.kv_lora_rank + DIMS.qk_rope_head_dim
TOPK = 2048
CACHES = {"bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}
#: 1.2 GB of bf16: far more than any L2.
CACHE_ROWS = 1 << 20
_SCALE = 1 / math.sqrt(DIMS.qk_nope_head_dim + DIMS.qk_rope_head_dim)
_FP8_UNIT = 0.25


@dataclass(frozen=True, slots=True)
class Cache:
    """Rows of a cache, every other of which is a trap of NaN that no token selects."""

    rows: torch.Tensor
    scale: float


def make_cache(name: str, device: torch.device, rows: int = CACHE_ROWS) -> Cache:
    """A random cache of a dtype of :data:`CACHES`."""
    dtype = CACHES[name]
    scale = _FP8_UNIT if dtype != torch.bfloat16 else 1.0
    made = torch.empty(rows, HEAD_DIM, dtype=dtype, device=device)
    step = 1 << 16
    for start in range(0, rows, step):
        part = made[start : start + step]
        part.copy_((torch.randn(part.shape, device=device) / scale).to(dtype))
    made.view(torch.uint8)[1::2].fill_(0xFF)  # NaN in either dtype
    return Cache(made, scale)


def make_sets(
    cache: Cache, tokens: int, heads: int, rows: int, sets: int, *, width: int = TOPK
) -> list[SparseMlaBatch]:
    """Batches of the same shape with queries, selections and outputs of their own.

    Args:
        cache: shared by all of them.
        tokens: tokens of a batch.
        heads: query heads.
        rows: keys of each token.
        sets: how many batches.
        width: slots of a token's selection; those behind its keys hold -1, as vLLM leaves them.
    """
    device = cache.rows.device
    chosen = torch.full((sets, tokens, width), -1, dtype=torch.int32, device=device)
    half = cache.rows.shape[0] // 2
    chosen[:, :, :rows] = 2 * torch.randint(
        half, (sets, tokens, rows), dtype=torch.int32, device=device
    )
    counts = torch.full((tokens,), rows, dtype=torch.int32, device=device)
    return [
        SparseMlaBatch(
            query=torch.randn(tokens, heads, HEAD_DIM, dtype=torch.bfloat16, device=device),
            cache_rows=cache.rows,
            page_size=64,
            topk=chosen[number],
            counts=counts,
            softmax_scale=_SCALE,
            query_scale=1.0,
            cache_scale=cache.scale,
            dims=DIMS,
            out=torch.full(
                (tokens, heads, DIMS.kv_lora_rank),
                float("nan"),
                dtype=torch.bfloat16,
                device=device,
            ),
            lse=torch.full((tokens, heads), float("nan"), device=device),
        )
        for number in range(sets)
    ]


def with_ragged_rows(batch: SparseMlaBatch) -> SparseMlaBatch:
    """The batch with random numbers of keys, one token without any, and fresh outputs."""
    tokens, device = len(batch.query), batch.query.device
    most = int(batch.counts.max())
    counts = torch.randint(1, most + 1, (tokens,), dtype=torch.int32, device=device)
    if tokens > 1:
        counts[tokens // 2] = 0
    slots = torch.arange(batch.topk.shape[1], device=device)
    topk = torch.where(slots < counts[:, None], batch.topk, -1)
    return replace(
        batch,
        topk=topk,
        counts=counts,
        out=torch.full_like(batch.out, float("nan")),
        lse=torch.full_like(batch.lse, float("nan")) if batch.lse is not None else None,
    )


def set_bytes(batch: SparseMlaBatch, rows: int) -> int:
    """Bytes that a launch touches, about."""
    row = batch.cache_rows.shape[1] * batch.cache_rows.element_size()
    return batch.query.nbytes + batch.out.nbytes + len(batch.query) * rows * row
