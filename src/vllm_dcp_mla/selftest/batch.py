"""A random batch, its paged cache sharded over ranks, and what attention over it must give.

The expected result is computed in float64 from the unsharded tensors: no kernel, metadata, index
conversion or merge of the package or of vLLM takes part in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..topology import local_seq_len

LATENT_DIM = 512
ROPE_DIM = 64
HEAD_DIM = LATENT_DIM + ROPE_DIM


@dataclass(frozen=True, slots=True)
class Shape:
    """What a batch looks like.

    Attributes:
        name: for reports.
        seq_lens: tokens of each request, its query tokens included.
        query_lens: query tokens of each request; decodes (and MTP) first, prefills behind.
        num_decodes: how many of the requests are decodes.
        num_heads: query heads, before tensor parallelism.
        interleave: tokens a rank stores before the next takes over; divides ``block_size``.
        cache_dtype: ``bfloat16`` or ``fp8_e4m3``.
        padding: query tokens of the batch that belong to no request (CUDA graph padding).
        late_rank: a rank that starts the step a second after the others.
        topk: keys a token selects at most.
        block_size: tokens of a cache block.
    """

    name: str
    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    num_decodes: int
    num_heads: int
    interleave: int = 1
    cache_dtype: str = "bfloat16"
    padding: int = 0
    late_rank: int | None = None
    topk: int = 256
    block_size: int = 64

    @property
    def num_tokens(self) -> int:
        """Query tokens of all requests, without padding."""
        return sum(self.query_lens)


@dataclass(frozen=True, slots=True)
class Batch:
    """The tensors of a batch, whole; every rank makes the same ones from the same seed.

    Attributes:
        query: ``[T, H, 576]``, of the keys' dtype or bf16; T includes padding.
        keys: per request ``[L, 576]`` bf16 or float8_e4m3fn.
        scores: per request ``[L]`` float32, the indexer's; a token attends the best it may see.
        token_request: request of each token, without padding.
        query_scale, key_scale: value of one unit of a quantised tensor; 1 for bf16.
    """

    query: torch.Tensor
    keys: list[torch.Tensor]
    scores: list[torch.Tensor]
    token_request: list[int]
    query_scale: float
    key_scale: float


def make_batch(shape: Shape, seed: int, *, quantizes_query: bool = True) -> Batch:
    """Draws a batch.

    Args:
        shape: what it looks like.
        seed: of the random numbers.
        quantizes_query: whether the query has an fp8 cache's dtype.
    """
    draw = torch.Generator().manual_seed(seed)
    fp8 = shape.cache_dtype == "fp8_e4m3"
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    query_dtype = dtype if quantizes_query else torch.bfloat16
    key_scale = 0.017 if fp8 else 1.0
    query_scale = 0.031 if query_dtype == torch.float8_e4m3fn else 1.0
    total = shape.num_tokens + shape.padding

    def normal(*size: int, unit: float, dtype: torch.dtype) -> torch.Tensor:
        return (torch.randn(*size, generator=draw) / unit).to(dtype)

    query = normal(total, shape.num_heads, HEAD_DIM, unit=query_scale, dtype=query_dtype)
    keys = [normal(length, HEAD_DIM, unit=key_scale, dtype=dtype) for length in shape.seq_lens]
    scores = [torch.rand(length, generator=draw) for length in shape.seq_lens]
    token_request = [r for r, queries in enumerate(shape.query_lens) for _ in range(queries)]
    return Batch(query, keys, scores, token_request, query_scale, key_scale)


def chosen_keys(shape: Shape, batch: Batch) -> list[torch.Tensor]:
    """The positions that each token attends: the best scores among those it may see."""
    chosen = []
    for request, (length, queries) in enumerate(zip(shape.seq_lens, shape.query_lens, strict=True)):
        for position in range(length - queries, length):
            visible = batch.scores[request][: position + 1]
            chosen.append(visible.topk(min(shape.topk, len(visible))).indices)
    return chosen


def shard_cache(
    shape: Shape, batch: Batch, rank: int, dcp: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank's paged cache and block table.

    Blocks are scattered and the rows that belong to nobody hold NaN, so that a wrong index shows.

    Returns:
        ``cache [blocks, block_size, 576]`` and ``block_table [requests, width]`` int32.
    """
    lengths = [local_seq_len(n, rank, dcp, shape.interleave) for n in shape.seq_lens]
    needed = [-(-n // shape.block_size) for n in lengths]
    width = max(-(-max(shape.seq_lens) // shape.block_size), 1)
    draw = torch.Generator().manual_seed(seed + rank)
    blocks = torch.randperm(sum(needed) + 3, generator=draw)
    cache = torch.full((len(blocks), shape.block_size, HEAD_DIM), float("nan"))
    cache = cache.to(batch.keys[0].dtype)
    table = torch.zeros(len(lengths), width, dtype=torch.int32)
    used = 0
    for request, keys in enumerate(batch.keys):
        positions = torch.arange(len(keys))
        mine = keys[(positions // shape.interleave) % dcp == rank]
        for index in range(needed[request]):
            block = int(blocks[used])
            used += 1
            table[request, index] = block
            rows = mine[index * shape.block_size : (index + 1) * shape.block_size]
            cache[block, : len(rows)] = rows
    return cache, table


def expected_output(shape: Shape, batch: Batch, scale: float) -> torch.Tensor:
    """Attention of every token over the keys it selected, ``[T, H, 512]`` float64, padding 0."""
    out = torch.zeros(len(batch.query), shape.num_heads, LATENT_DIM, dtype=torch.float64)
    chosen = chosen_keys(shape, batch)
    for token, request in enumerate(batch.token_request):
        keys = batch.keys[request].double()[chosen[token]] * batch.key_scale
        scores = batch.query[token].double() @ keys.T * (batch.query_scale * scale)
        out[token] = torch.softmax(scores, dim=-1) @ keys[:, :LATENT_DIM]
    return out
