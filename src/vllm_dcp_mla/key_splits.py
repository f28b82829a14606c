"""How the keys of a token are shared between thread blocks: arithmetic only.

A small batch has fewer tokens than the GPU has multiprocessors (SMs). Each token's keys are then
split, and partial results are merged by their log-sum-exp (LSE), as ranks' are.
"""

from __future__ import annotations

#: Query heads and keys that a thread block works on at a time.
BLOCK_HEADS = 64
BLOCK_KEYS = 64
#: More parts than this cost more to merge than they save.
MAX_SPLITS = 32


def head_blocks(num_heads: int) -> int:
    """Thread blocks that share the heads of a token."""
    return -(-num_heads // BLOCK_HEADS)


def num_splits(num_tokens: int, num_heads: int, topk: int, num_sms: int) -> int:
    """Parts that each token's keys are split into, from shapes alone; at least 1.

    Above 1, all thread blocks run at once: ``tokens * head_blocks * splits <= num_sms``.

    Args:
        num_tokens: tokens of the launch.
        num_heads: query heads.
        topk: most keys of a token; how many it has is known on the GPU only.
        num_sms: multiprocessors.
    """
    blocks = max(num_tokens * head_blocks(num_heads), 1)
    return max(min(num_sms // blocks, -(-topk // BLOCK_KEYS), MAX_SPLITS), 1)


def partial_bytes(latent_dim: int, num_sms: int) -> int:
    """Bytes of float32 partial results and LSEs that suffice for every launch, of any model.

    Follows from the bound in :func:`num_splits`: at most one thread block of partial results an SM.
    """
    return num_sms * BLOCK_HEADS * (latent_dim + 1) * 4
