"""Random kernel inputs, and float64 attention to compare with."""

import math
from dataclasses import replace

import torch

from vllm_dcp_mla.kernels.base import LaunchBuffers, MlaDims, SparseMlaBatch
from vllm_dcp_mla.key_splits import arrival_bytes, partial_bytes
from vllm_dcp_mla.workspace import counter_bytes, softmax_stats_bytes

ROPE = MlaDims(512, 192, 64)
NOPE = MlaDims(512, 256, 0)


def make_batch(
    tokens,
    heads,
    topk,
    *,
    dims=ROPE,
    dtype=torch.bfloat16,
    query_dtype=None,
    counts=None,
    seed=0,
    want_lse=True,
    row_gap=0,
    device="cpu",
):
    """A batch whose outputs are NaN, and whose unused cache rows and top-k slots are traps.

    The query has the cache's dtype unless it is given one; ``row_gap`` elements lie between rows.
    """
    draw = torch.Generator().manual_seed(seed)
    dim = dims.kv_lora_rank + dims.qk_rope_head_dim
    pages, page = 7, 32
    rows = torch.randn(pages * page, dim, generator=draw)
    query = torch.randn(tokens, heads, dim, generator=draw)
    used = torch.randperm(pages * page, generator=draw)[: pages * page // 2]
    trap = torch.ones(pages * page, dtype=torch.bool)
    trap[used] = False
    rows[trap] = float("nan")
    if counts is None:
        counts = torch.randint(0, topk + 1, (tokens,), generator=draw)
    counts = torch.as_tensor(counts, dtype=torch.int32)
    index = torch.full((tokens, topk), -1, dtype=torch.int32)
    for token, count in enumerate(counts.tolist()):
        index[token, :count] = used[torch.randint(len(used), (count,), generator=draw)].int()
    query_dtype = query_dtype or dtype
    wide = torch.full((pages * page, dim + row_gap), float("nan")).to(dtype)
    wide[:, :dim] = rows.to(dtype)
    return SparseMlaBatch(
        query=query.to(device, query_dtype),
        cache_rows=wide.to(device)[:, :dim],
        page_size=page,
        topk=index.to(device),
        counts=counts.to(device),
        softmax_scale=1 / math.sqrt(dim),
        query_scale=0.7 if query_dtype == torch.float8_e4m3fn else 1.0,
        cache_scale=1.3 if dtype == torch.float8_e4m3fn else 1.0,
        dims=dims,
        out=torch.full(
            (tokens, heads, dims.kv_lora_rank), float("nan"), dtype=torch.bfloat16, device=device
        ),
        lse=torch.full((tokens, heads), float("nan"), device=device) if want_lse else None,
    )


def make_buffers(heads, tokens, scratch=4096):
    """Buffers that hold exactly one launch of that many tokens."""
    return LaunchBuffers(
        torch.zeros(softmax_stats_bytes(heads, tokens) + scratch, dtype=torch.int8),
        torch.zeros(counter_bytes(heads, tokens, 1), dtype=torch.uint8),
    )


def make_partials(num_sms, device="cpu"):
    """Buffers of a kernel that splits keys: NaN where it has not written."""
    size = partial_bytes(512, num_sms) // 4
    partials = torch.full((size,), float("nan"), device=device)
    arrivals = torch.zeros(arrival_bytes(num_sms), dtype=torch.uint8, device=device)
    return LaunchBuffers(partials.view(torch.int8), arrivals)


def expected(batch):
    """``(out, base-2 lse)`` in float64 on the CPU; empty rows (0, -inf)."""
    moved = {n: v.cpu() for n in batch.__slots__ if hasattr(v := getattr(batch, n), "cpu")}
    batch = replace(batch, **moved)
    tokens, heads, _ = batch.query.shape
    out = torch.zeros(tokens, heads, batch.dims.kv_lora_rank, dtype=torch.float64)
    lse = torch.full((tokens, heads), float("-inf"), dtype=torch.float64)
    for token, count in enumerate(batch.counts.tolist()):
        if not count:
            continue
        keys = batch.cache_rows[batch.topk[token, :count].long()].double() * batch.cache_scale
        query = batch.query[token].double() * batch.query_scale
        scores = query @ keys.T * batch.softmax_scale
        out[token] = torch.softmax(scores, -1) @ keys[:, : batch.dims.kv_lora_rank]
        lse[token] = torch.logsumexp(scores, -1) / math.log(2)
    return out, lse
