"""Lengths of a rank's shard, as tensor operations that never wait for the GPU."""

from __future__ import annotations

import torch


def local_lengths(lengths: torch.Tensor, rank: int, dcp: int, interleave: int) -> torch.Tensor:
    """:func:`..topology.local_seq_len` of many lengths at once.

    Args:
        lengths: global lengths, any shape, an integer dtype, on any device.
        rank: the rank that stores the shard.
        dcp: ranks that share a request.
        interleave: tokens a rank stores before the next takes over.

    Returns:
        Local lengths, of the same shape, dtype and device.
    """
    period = dcp * interleave
    rest = torch.remainder(lengths, period) - rank * interleave
    rounds = torch.div(lengths, period, rounding_mode="floor")
    return rounds * interleave + rest.clamp_(0, interleave)
