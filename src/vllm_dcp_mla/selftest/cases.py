"""The batches that `selftest` runs."""

from __future__ import annotations

from .batch import Shape


def warm_up(num_heads: int, interleave: int) -> tuple[Shape, ...]:
    """What an engine runs before it serves, so that stock's kernels are compiled: decode and MTP.

    Args:
        num_heads: query heads, before tensor parallelism.
        interleave: tokens a rank stores before the next takes over.
    """
    return (
        Shape("warm-up, decode", (9, 330), (1, 1), 2, num_heads, interleave),
        Shape("warm-up, mtp", (9, 330), (4, 4), 2, num_heads, interleave),
    )


def cases(num_heads: int, dcp: int, interleave: int) -> tuple[Shape, ...]:
    """Decode, MTP and mixed batches; every one leaves ranks without tokens somewhere.

    Args:
        num_heads: query heads, before tensor parallelism.
        dcp: ranks that share a request's cache.
        interleave: tokens a rank stores before the next takes over.
    """
    few = max(dcp - 1, 1)
    return (
        Shape("decode", (5, 1, 700, 65), (1, 1, 1, 1), 4, num_heads, interleave),
        Shape("fewer tokens than ranks", (few, 1, 2), (1, 1, 1), 3, num_heads, interleave),
        Shape("mtp", (4, 129, 600), (4, 4, 4), 3, num_heads, interleave),
        Shape("mtp, late rank", (7, 66), (3, 3), 2, num_heads, interleave, late_rank=dcp - 1),
        Shape("decode and prefill", (300, 1, 3, 90), (1, 1, 3, 9), 2, num_heads, interleave),
        Shape("graph padding", (5, 70), (1, 1), 2, num_heads, interleave, padding=3),
        Shape("fp8 cache", (300, 1, 40), (1, 1, 7), 2, num_heads, interleave, "fp8_e4m3"),
    )
