"""What runs on the GPU: attention over a share of a token's keys, and the merge of the shares.

:mod:`.triton_decode` says how the first is launched and why it is as it is, :mod:`.merge_parts` the
same of the second. :mod:`.spread` cuts a library's keys into the same shares.
"""

from __future__ import annotations

from vllm.triton_utils import tl, triton

# A function of tl that is itself jitted, such as cdiv or zeros, costs the interpreter milliseconds.

#: Arguments that vary at run time; nothing is compiled for them.
ATTEND_POINTERS = (
    *("query_ptr", "cache_ptr", "topk_ptr", "counts_ptr", "out_ptr", "lse_ptr"),
    *("partial_out_ptr", "partial_lse_ptr", "arrivals_ptr"),
)
ATTEND_INTEGERS = (
    *("query_token", "query_head", "cache_row", "topk_token", "out_token", "out_head"),
    *("lse_token", "heads", "head_blocks", "splits"),
)
MERGE_POINTERS = ("partial_out_ptr", "partial_lse_ptr", "counts_ptr", "out_ptr", "lse_ptr")
MERGE_INTEGERS = ("out_token", "out_head", "lse_token", "heads", "splits")


@triton.jit  # type: ignore[untyped-decorator]
def share_of_keys(count, splits, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Keys of a part: whole blocks, so that the last parts of a short row are empty."""
    return ((count + splits - 1) // splits + BLOCK_N - 1) // BLOCK_N * BLOCK_N


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=ATTEND_INTEGERS, do_not_specialize_on_alignment=ATTEND_POINTERS
)
def attend_kernel(  # type: ignore[no-untyped-def]
    query_ptr,
    cache_ptr,
    topk_ptr,
    counts_ptr,
    out_ptr,
    lse_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    arrivals_ptr,
    query_token,
    query_head,
    cache_row,
    topk_token,
    out_token,
    out_head,
    lse_token,
    heads,
    head_blocks,
    splits,
    score_scale,  # to base 2
    value_scale,
    LATENT: tl.constexpr,  # noqa: N803
    ROTARY: tl.constexpr,  # noqa: N803
    QUERY_UNIT: tl.constexpr,  # noqa: N803
    BLOCK_H: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    MERGES: tl.constexpr,  # noqa: N803
    MERGED_DIMS: tl.constexpr,  # noqa: N803
    MAX_S: tl.constexpr,  # noqa: N803
):
    """A block of heads of one token over its part of the keys; all of them where it is alone."""
    # Thread blocks of one part follow each other: they read the same rows.
    head_block = tl.program_id(0) % head_blocks
    head = head_block * BLOCK_H + tl.arange(0, BLOCK_H)
    part = tl.program_id(0) // head_blocks
    token = (part // splits).to(tl.int64)
    count = tl.load(counts_ptr + token)
    share = share_of_keys(count, splits, BLOCK_N)
    begin = (part % splits) * share
    end = tl.minimum(begin + share, count)
    parts = splits
    if MERGES:
        # The first part of a row is never left out: it clears a row without keys.
        parts = tl.maximum(tl.cdiv(count, tl.maximum(share, 1)), 1)
        if part % splits >= parts:
            return
    elif (begin >= end) & (splits > 1):
        return

    kind: tl.constexpr = tl.float16 if cache_ptr.dtype.element_ty == tl.float8e4nv else tl.bfloat16
    held = (head < heads)[:, None]
    latent = tl.arange(0, LATENT)
    # Alignment is promised to the compiler here, and checked before the launch.
    query_at = query_ptr + token * query_token + head[:, None] * query_head
    query = tl.load(tl.multiple_of(query_at + latent[None, :], (1, 16)), mask=held, other=0.0)
    if kind == tl.float16:
        query = (query.to(tl.float32) * QUERY_UNIT).to(kind)
    if ROTARY > 0:
        rotary = LATENT + tl.arange(0, ROTARY)
        query_rot = tl.load(
            tl.multiple_of(query_at + rotary[None, :], (1, 16)), mask=held, other=0.0
        )
        if kind == tl.float16:
            query_rot = (query_rot.to(tl.float32) * QUERY_UNIT).to(kind)

    top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.full((BLOCK_H,), 0.0, tl.float32)
    acc = tl.full((BLOCK_H, LATENT), 0.0, tl.float32)
    topk_at = topk_ptr + token * topk_token
    for start in range(begin, end, BLOCK_N):
        slot = start + tl.arange(0, BLOCK_N)
        valid = slot < end
        row = tl.load(topk_at + slot, mask=valid, other=0).to(tl.int64)
        row_at = cache_ptr + row[:, None] * cache_row
        keys = tl.load(
            tl.multiple_of(row_at + latent[None, :], (1, 16)), mask=valid[:, None], other=0.0
        ).to(kind)
        scores = tl.dot(query, keys.T)
        if ROTARY > 0:
            keys_rot = tl.load(
                tl.multiple_of(row_at + rotary[None, :], (1, 16)), mask=valid[:, None], other=0.0
            ).to(kind)
            scores = tl.dot(query_rot, keys_rot.T, scores)
        scores = tl.where(valid[None, :], scores * score_scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        fade = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(kind), keys, acc * fade[:, None])
        top = new_top

    if parts == 1:
        # By the count: a total that is no number must not pass for a row without keys.
        total = tl.where(count > 0, total, 1.0)
        out = acc * (value_scale / total)[:, None]
        lse = top + tl.log2(total)
        out_at = out_ptr + token * out_token + head[:, None] * out_head + latent[None, :]
        tl.store(tl.multiple_of(out_at, (1, 16)), out.to(tl.bfloat16), mask=held)
        tl.store(lse_ptr + token * lse_token + head, lse * 0.6931471805599453, mask=head < heads)
    else:
        partial = part.to(tl.int64) * heads + head
        partial_at = partial_out_ptr + partial[:, None] * LATENT + latent[None, :]
        partial_out = acc * (value_scale / total)[:, None]
        tl.store(tl.multiple_of(partial_at, (1, 16)), partial_out, mask=held)
        tl.store(partial_lse_ptr + partial, top + tl.log2(total), mask=head < heads)
        if MERGES:
            # Every thread's results are out before the block's one arrival is counted.
            tl.debug_barrier()
            arrivals_at = arrivals_ptr + token * head_blocks + head_block
            arrived = tl.atomic_add(arrivals_at, 1, sem="acq_rel", scope="gpu")
            if arrived == parts - 1:
                tl.store(arrivals_at, 0)  # as the next launch expects it
                _merge_block(
                    partial_out_ptr + token * splits * heads * LATENT,
                    partial_lse_ptr + token * splits * heads,
                    out_ptr + token * out_token,
                    lse_ptr + token * lse_token,
                    out_head,
                    head,
                    heads,
                    parts,
                    LATENT,
                    MERGED_DIMS,
                    MAX_S,
                )


@triton.jit  # type: ignore[untyped-decorator]
def _merge_block(  # type: ignore[no-untyped-def]
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    lse_ptr,
    out_head,
    head,
    heads,
    parts,
    LATENT: tl.constexpr,  # noqa: N803
    MERGED_DIMS: tl.constexpr,  # noqa: N803
    MAX_S: tl.constexpr,  # noqa: N803
):
    """Merges the parts of one token's block of heads; other blocks wrote them: L1 is passed by."""
    held = head < heads
    every = tl.arange(0, MAX_S)
    lses = tl.load(
        partial_lse_ptr + every[:, None] * heads + head[None, :],
        mask=(every < parts)[:, None] & held[None, :],
        other=float("-inf"),
        cache_modifier=".cg",
    )
    top = tl.where(held, tl.max(lses, 0), 0.0)
    total = tl.where(held, tl.sum(tl.exp2(lses - top[None, :]), 0), 1.0)
    for first in tl.static_range(0, LATENT, MERGED_DIMS):
        latent = first + tl.arange(0, MERGED_DIMS)
        acc = tl.zeros((head.shape[0], MERGED_DIMS), tl.float32)
        for part in tl.range(0, parts, loop_unroll_factor=4):
            at = part * heads + head
            lse = tl.load(
                partial_lse_ptr + at, mask=held, other=float("-inf"), cache_modifier=".cg"
            )
            part_at = partial_out_ptr + at[:, None].to(tl.int64) * LATENT + latent[None, :]
            merged = tl.load(
                tl.multiple_of(part_at, (1, 16)),
                mask=held[:, None],
                other=0.0,
                cache_modifier=".cg",
            )
            acc += merged * (tl.exp2(lse - top) / total)[:, None]
        out_at = out_ptr + head[:, None] * out_head + latent[None, :]
        tl.store(tl.multiple_of(out_at, (1, 16)), acc.to(tl.bfloat16), mask=held[:, None])
    tl.store(lse_ptr + head, (top + tl.log2(total)) * 0.6931471805599453, mask=held)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=MERGE_INTEGERS, do_not_specialize_on_alignment=MERGE_POINTERS
)
def merge_kernel(  # type: ignore[no-untyped-def]
    partial_out_ptr,
    partial_lse_ptr,
    counts_ptr,
    out_ptr,
    lse_ptr,
    out_token,
    out_head,
    lse_token,
    heads,
    splits,
    LATENT: tl.constexpr,  # noqa: N803
    LSE_UNIT: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_S: tl.constexpr,  # noqa: N803
    MAX_S: tl.constexpr,  # noqa: N803
):
    """The parts of one head of one token; ``LSE_UNIT`` makes their LSE one to base 2."""
    token = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    count = tl.load(counts_ptr + token)
    # Parts behind these were left unwritten.
    share = tl.maximum(share_of_keys(count, splits, BLOCK_N), 1)
    parts = (count + share - 1) // share
    partial = token * splits * heads + head
    every = tl.arange(0, MAX_S)
    lses = tl.load(
        partial_lse_ptr + partial + every * heads, mask=every < parts, other=float("-inf")
    )
    lses = lses * LSE_UNIT
    top = tl.where(parts > 0, tl.max(lses, 0), 0.0)
    total = tl.where(parts > 0, tl.sum(tl.exp2(lses - top), 0), 1.0)

    latent = tl.arange(0, LATENT)
    acc = tl.full((LATENT,), 0.0, tl.float32)
    for first in range(0, parts, BLOCK_S):
        some = first + tl.arange(0, BLOCK_S)
        at = partial + some.to(tl.int64) * heads
        lse = tl.load(partial_lse_ptr + at, mask=some < parts, other=float("-inf"))
        out_at = partial_out_ptr + at[:, None] * LATENT + latent[None, :]
        out = tl.load(tl.multiple_of(out_at, (1, 16)), mask=(some < parts)[:, None], other=0.0)
        weight = tl.exp2(lse * LSE_UNIT - top) / total
        acc += tl.sum(out.to(tl.float32) * weight[:, None], 0)
    tl.store(
        tl.multiple_of(out_ptr + token * out_token + head * out_head + latent, (16,)),
        acc.to(tl.bfloat16),
    )
    lse = (top + tl.log2(total)) * 0.6931471805599453
    tl.store(lse_ptr + token * lse_token + head, tl.where(parts > 0, lse, float("-inf")))
