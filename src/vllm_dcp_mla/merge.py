"""The merge of partial attention over KV shards: the plain torch reference."""

from __future__ import annotations

from typing import Literal

import torch

LseBase = Literal["e", "2"]


def combine_partials(
    outs: torch.Tensor, lses: torch.Tensor, base: LseBase
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges the partial results of R ranks into attention over all their keys.

    ``lse = log(sum_r b**lse_r)`` and ``out = sum_r b**(lse_r - lse) * out_r``. A rank whose LSE is
    +inf, NaN or -inf for a row holds nothing for it: kernels report an empty row in all three ways,
    and what they leave in ``out`` for it is not read.

    Args:
        outs: ``[R, T, H, D]``, any floating dtype; R ranks, T tokens, H heads.
        lses: ``[R, T, H]``.
        base: the logarithm's base, ``"e"`` or ``"2"``.

    Returns:
        ``(out [T, H, D], lse [T, H])`` in ``outs``' and ``lses``' dtypes, computed in at least
        float32; rows that no rank holds are 0 with LSE -inf.

    Raises:
        ValueError: an unknown base, or shapes that do not belong together.
    """
    if base not in ("e", "2"):
        raise ValueError(f'base must be "e" or "2", got {base!r}')
    if outs.dim() != 4 or lses.shape != outs.shape[:3]:
        raise ValueError(
            f"outs must be [R, T, H, D] and lses [R, T, H], got {tuple(outs.shape)} and "
            f"{tuple(lses.shape)}"
        )
    exp, log = (torch.exp, torch.log) if base == "e" else (torch.exp2, torch.log2)
    lse = lses.to(torch.promote_types(lses.dtype, torch.float32))
    held = torch.isfinite(lse)
    lse = lse.masked_fill(~held, float("-inf"))
    top = lse.amax(dim=0)
    top = torch.where(torch.isfinite(top), top, torch.zeros_like(top))
    weights = exp(lse - top)
    total = weights.sum(dim=0)
    merged = top + log(total)
    weights = weights / torch.where(total > 0, total, torch.ones_like(total))
    parts = outs.to(weights.dtype).masked_fill(~held.unsqueeze(-1), 0.0)
    out = (parts * weights.unsqueeze(-1)).sum(dim=0)
    return out.to(outs.dtype), merged.to(lses.dtype)
