"""How the keys of a token are shared between thread blocks: arithmetic only.

A small batch has fewer tokens than the GPU has multiprocessors (SMs). Each token's keys are then
split, and partial results are merged by their log-sum-exp (LSE), as ranks' are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Heads of partial results that an SM may have under way; bounds their memory.
PARTIAL_HEADS = 64
#: Parts that the merge has room for.
MAX_SPLITS = 64
#: Keys that FlashMLA's kernel works on at a time.
SPREAD_KEYS = 128
#: Rotary dims of the queries that it takes.
_SPREAD_ROTARY_DIM = 64


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the attention kernel cuts its work.

    Attributes:
        heads: query heads of a thread block, a power of 2 of at least 16; Hopper's wide matrix
            instructions need 64.
        keys: keys it works on at a time, a power of 2 of at least 16.
        warps: warps of a thread block.
        stages: blocks of keys under way from memory.
        blocks_per_sm: thread blocks that run at once on an SM where keys are split.
        splits: most parts of a token's keys.
        merges_in_launch: whether the last thread block of a token's heads merges their parts; a
            second launch does otherwise.
    """

    heads: int = 64
    keys: int = 64
    warps: int = 8
    stages: int = 3
    blocks_per_sm: int = 1
    splits: int = 32
    merges_in_launch: bool = False

    def __post_init__(self) -> None:
        if self.blocks_per_sm * self.heads > PARTIAL_HEADS or self.splits > MAX_SPLITS:
            raise ValueError(
                f"{self} has partial results for more than {PARTIAL_HEADS} heads an SM, or more "
                f"than {MAX_SPLITS} parts"
            )

    def __str__(self) -> str:
        merge = "same launch" if self.merges_in_launch else "second launch"
        return (
            f"{self.heads} heads x {self.keys} keys, {self.warps} warps, {self.stages} stages, "
            f"{self.blocks_per_sm} blocks an SM, {self.splits} parts, merged in the {merge}"
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """A tiling and the launches that it is for.

    Attributes:
        scores: most query-key products of a launch: tokens x query heads x keys of a token.
        tiling: what they use.
    """

    scores: int
    tiling: Tiling


ANY = 1 << 62  # more than any launch has

#: The first that holds is taken. ``vllm-dcp-mla bench --work tilings`` measures the candidates and
#: prints the best of each shape. On an H200 (torch 2.11, Triton 3.6), microseconds for blocks of
#: 16, 32 and 64 heads, merged by a second launch:
#:
#: =====  =====  ======  ==================  ==================
#: heads  rows   tokens  bf16                fp8_e4m3
#: =====  =====  ======  ==================  ==================
#: 64     512    1       10.9, 12.6, 15.5    11.8, 14.5, 17.5
#: 64     512    4       12.0, 14.1, 16.6    12.9, 15.5, 18.2
#: 64     512    16      27.7, 21.6, 22.6    33.0, 24.6, 23.5
#: 64     512    32      43.9, 33.5, 30.8    58.9, 41.9, 32.9
#: 64     2,048  1       13.4, 14.9, 17.8    14.0, 16.5, 19.7
#: 64     2,048  4       26.3, 20.6, 22.3    31.7, 23.4, 23.5
#: 64     2,048  16      67.9, 49.5, 40.6    102.5, 68.2, 46.0
#: 128    512    1       11.0, 13.2, 15.6    12.0, 15.1, 17.9
#: 128    512    4       18.9, 15.2, 17.7    20.4, 16.3, 19.7
#: 128    512    16      42.3, 32.1, 28.5
#: 128    2,048  1       19.9, 16.0, 18.2
#: 128    2,048  4       38.1, 28.3, 25.8
#: =====  =====  ======  ==================  ==================
#:
#: All of these cross at the same products of tokens, heads and rows. A merge in the same launch is
#: ahead by more than 3 % at 32 and 64 tokens of 512 rows only, where other kernels are faster yet.
CHOICES: tuple[Choice, ...] = (
    Choice(1 << 17, Tiling(heads=16, blocks_per_sm=2)),
    Choice(1 << 19, Tiling(heads=32)),
    Choice(ANY, Tiling()),
)


def tiling_for(num_tokens: int, num_heads: int, rows: int) -> Tiling:
    """The tiling of a launch, from shapes alone.

    Args:
        num_tokens: tokens of the launch.
        num_heads: query heads.
        rows: keys that a token is expected to have here.
    """
    scores = max(num_tokens, 1) * num_heads * rows
    return next(c.tiling for c in CHOICES if scores <= c.scores)


def tilings_of(num_heads: int, rows: int) -> tuple[Tiling, ...]:
    """Every tiling that launches of a layer may use, each once."""
    return tuple(dict.fromkeys(c.tiling for c in CHOICES if num_heads * rows <= c.scores))


def head_blocks(num_heads: int, block_heads: int = PARTIAL_HEADS) -> int:
    """Thread blocks that share the heads of a token."""
    return -(-num_heads // block_heads)


def num_splits(num_tokens: int, num_heads: int, topk: int, num_sms: int, tiling: Tiling) -> int:
    """Parts that each token's keys are split into, from shapes alone; at least 1.

    Above 1, all thread blocks run at once:
    ``tokens * head_blocks * splits <= num_sms * blocks_per_sm``.

    Args:
        num_tokens: tokens of the launch.
        num_heads: query heads.
        topk: most keys of a token; how many it has is known on the GPU only.
        num_sms: multiprocessors.
        tiling: of the launch.
    """
    blocks = max(num_tokens * head_blocks(num_heads, tiling.heads), 1)
    room = num_sms * tiling.blocks_per_sm // blocks
    return max(min(room, -(-topk // tiling.keys), tiling.splits), 1)


def num_spreads(num_tokens: int, num_heads: int, topk: int, rows: int, num_sms: int) -> int:
    """Parts of each token's keys for FlashMLA, which does not split them; 1 to leave it alone.

    The two launches around it must be paid for by steps of 128 keys that a thread block is spared:
    on an H200 a step takes 3.5 us, the launches 5 us for one token and 11 us for 64, whose parts
    share the memory's bandwidth besides. ``tokens * head_blocks * parts <= num_sms`` above 1.

    Args:
        num_tokens: tokens of the launch.
        num_heads: query heads.
        topk: most keys of a token.
        rows: keys that a token is expected to have here; it may have more, about a rank's share.
        num_sms: multiprocessors.
    """
    steps = -(-min(topk, rows + 2 * math.isqrt(rows)) // SPREAD_KEYS)
    blocks = max(num_tokens * head_blocks(num_heads), 1)
    parts = max(min(num_sms // blocks, steps, MAX_SPLITS), 1)
    spared = steps - -(-steps // parts)
    return parts if spared >= max(1 + blocks / 16, 3) else 1


def spread_width(topk: int, parts: int) -> int:
    """Slots that hold a part of ``topk`` keys; a multiple of :data:`SPREAD_KEYS`."""
    return -(-topk // (parts * SPREAD_KEYS)) * SPREAD_KEYS


def partial_bytes(latent_dim: int, num_sms: int) -> int:
    """Bytes that suffice for the partial results of every launch, of models with and without rope.

    They are float32 with an LSE, or bf16 beside bf16 copies of the queries. Follows from the bounds
    in :func:`num_splits`, :func:`num_spreads` and of :class:`Tiling`.
    """
    split = (latent_dim + 1) * 4
    spread = (latent_dim + latent_dim + _SPREAD_ROTARY_DIM) * 2
    return num_sms * PARTIAL_HEADS * max(split, spread)


def arrival_bytes(num_sms: int) -> int:
    """Bytes of counters, one int32 for each token and block of heads whose keys are split."""
    smallest_block = 16
    return num_sms * (PARTIAL_HEADS // smallest_block) * 4
