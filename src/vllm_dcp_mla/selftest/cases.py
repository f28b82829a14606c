"""The batches that `selftest` runs."""

from __future__ import annotations

from typing import Any

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


def pcp_cases(num_heads: int, pcp: int, dcp: int, interleave: int) -> tuple[Shape, ...]:
    """Decodes that all ranks have, and prefills that vLLM divides among PCP ranks.

    Prompts of fewer tokens than ``2 * pcp`` are on every rank; others are in two pieces a rank,
    of which the last one of all is shorter: with 4 ranks, 153 tokens are 33 on one and 40 on three.

    Args:
        num_heads: query heads, before tensor parallelism.
        pcp: ranks that share a prompt's query tokens.
        dcp: ranks that share a request's cache.
        interleave: tokens a rank stores before the next takes over.
    """
    few = max(dcp - 1, 1)

    def shape(
        name: str, lens: tuple[int, ...], queries: tuple[int, ...], decodes: int, **more: Any
    ) -> Shape:
        return Shape(name, lens, queries, decodes, num_heads, interleave, **more)

    return (
        shape("decode", (5, 1, 700, 65), (1, 1, 1, 1), 4),
        shape("prompt, unequal rows", (153,), (153,), 0),
        shape("long context", (1999,), (2 * pcp + 3,), 0),
        shape("short prompts", (few, 1, 5), (few, 1, 5), 0),
        shape("mixed", (300, 1, 3, 90, 1, 401), (1, 1, 3, 33, 1, 40), 2),
        shape("mtp, mixed", (4, 600, 77, 500), (4, 4, 77, 19), 2),
        shape("mixed, late rank", (7, 66, 450), (3, 3, 60), 2, late_rank=dcp - 1),
        shape("fp8 cache", (300, 1, 40, 700), (1, 1, 40, 21), 2, cache_dtype="fp8_e4m3"),
    )
