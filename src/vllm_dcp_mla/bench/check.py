"""Sparse MLA attention in float64, and how far a kernel's result is from it."""

from __future__ import annotations

import torch

from ..kernels.base import SparseMlaBatch
from ..merge import LseBase

#: Relative error of a token's head that rounding to bf16 explains, as in ``selftest``.
LIMIT = 0.015
#: The same of the LSE, absolute: weights are rounded, sums are not.
LSE_LIMIT = 0.01
_SAMPLED = 8  # tokens; every token is looked at for what was left unwritten


def attend_float64(
    batch: SparseMlaBatch, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out [n, H, V], lse [n, H])`` of some tokens, the LSE in base e, empty rows (0, -inf)."""
    scores_scale = batch.softmax_scale * batch.query_scale
    out, lse = [], []
    for token in tokens.tolist():
        rows = batch.topk[token, : int(batch.counts[token])].long()
        keys = batch.cache_rows[rows].double() * batch.cache_scale
        scores = batch.query[token].double() @ keys.T * scores_scale
        lse.append(torch.logsumexp(scores, -1))
        weights = torch.softmax(scores, -1)
        out.append(weights @ keys[:, : batch.dims.kv_lora_rank])
    return torch.stack(out), torch.stack(lse)


def poison(batch: SparseMlaBatch) -> None:
    """Fills the outputs with NaN, so that what is not written shows."""
    batch.out.fill_(float("nan"))
    if batch.lse is not None:
        batch.lse.fill_(float("nan"))


def sampled_tokens(tokens: int, device: torch.device) -> torch.Tensor:
    """The first, the last, the middle and some between."""
    spread = torch.linspace(0, tokens - 1, min(_SAMPLED, tokens)).round().long()
    return torch.unique(torch.cat((spread, torch.tensor([tokens // 2])))).to(device)


def problem_of(
    out: torch.Tensor,
    lse: torch.Tensor,
    wanted_out: torch.Tensor,
    wanted_lse: torch.Tensor,
    base: LseBase,
) -> str | None:
    """What is wrong with some tokens' results, None for nothing; in words with figures."""
    unit = 0.6931471805599453 if base == "2" else 1.0
    if bool(torch.isnan(out).any()) or bool(torch.isnan(lse).any()):
        return "rows were left unwritten, or hold NaN"
    norm = wanted_out.norm(dim=-1)
    error = (out.double() - wanted_out).norm(dim=-1) / torch.where(norm > 0, norm, 1.0)
    worst = float(error.max())
    if not worst <= LIMIT:
        return f"its relative error is {worst:.4f}, at most {LIMIT} is rounding"
    empty = wanted_lse == float("-inf")
    if bool((lse[empty] != float("-inf")).any()):
        return "the LSE of a row without keys is not -inf"
    off = (lse.double() * unit - wanted_lse)[~empty].abs()
    if off.numel() and not float(off.max()) <= LSE_LIMIT:
        return f"its LSE is off by {float(off.max()):.4f}, at most {LSE_LIMIT} is rounding"
    return None


def problem_with(batch: SparseMlaBatch, base: LseBase) -> str | None:
    """What is wrong with a launched batch, None for nothing."""
    assert batch.lse is not None
    # Everything is looked at for NaN, a sample is compared.
    if bool(torch.isnan(batch.out).any()) or bool(torch.isnan(batch.lse).any()):
        return "rows were left unwritten, or hold NaN"
    tokens = sampled_tokens(len(batch.query), batch.query.device)
    wanted = attend_float64(batch, tokens)
    return problem_of(batch.out[tokens], batch.lse[tokens], *wanted, base)
