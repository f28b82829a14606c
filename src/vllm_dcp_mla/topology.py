"""Heads, ranks and the interleave of a sharded KV cache: arithmetic only.

Words used here and everywhere in the package:

* ``tp``, ``pcp``, ``dcp``: sizes of vLLM's tensor, prefill context and decode context parallel
  groups. ``tp * pcp`` ranks hold one copy of the model.
* heads: query heads. ``heads_per_rank = heads / tp``; "gathered" heads are those that the attention
  kernel of one rank sees once decode queries have been exchanged.
* interleave: how many consecutive tokens of a request one DCP rank stores before the next rank
  takes over (``--cp-kv-cache-interleave-size``).
"""

from __future__ import annotations

import math


def _require_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def gathered_heads(heads_per_rank: int, tp: int, pcp: int, dcp: int) -> int:
    """Query heads that the attention kernel of one rank really sees in a decode step.

    Without PCP the DCP group is a slice of the TP group, and its members exchange their heads:
    ``heads_per_rank * dcp``. With PCP, heads are exchanged only where the DCP group also spans the
    TP axis (``dcp == tp * pcp > pcp``): ``heads_per_rank * tp``. A DCP group that equals the PCP
    group holds the same heads on every rank already.

    Args:
        heads_per_rank: query heads of one rank, after tensor parallelism.
        tp: tensor parallel size.
        pcp: prefill context parallel size.
        dcp: decode context parallel size.

    Raises:
        ValueError: a size is below 1.
    """
    _require_positive(heads_per_rank=heads_per_rank, tp=tp, pcp=pcp, dcp=dcp)
    if pcp == 1:
        return heads_per_rank * dcp
    if dcp == tp * pcp and dcp > pcp:
        return heads_per_rank * tp
    return heads_per_rank


def local_seq_len(seq_len: int, rank: int, dcp: int, interleave: int = 1) -> int:
    """Tokens of a ``seq_len``-token request that ``rank`` of ``dcp`` ranks stores.

    ``floor(L / (D*I)) * I + clamp(L mod (D*I) - r*I, 0, I)`` with L tokens, D ranks, interleave I
    (vLLM's layout, RFC vllm-project/vllm#50391).

    Raises:
        ValueError: a negative length, a size below 1, or a rank outside ``[0, dcp)``.
    """
    _require_positive(dcp=dcp, interleave=interleave)
    if seq_len < 0:
        raise ValueError(f"seq_len must not be negative, got {seq_len}")
    if not 0 <= rank < dcp:
        raise ValueError(f"rank must be in [0, {dcp}), got {rank}")
    rounds, rest = divmod(seq_len, dcp * interleave)
    return rounds * interleave + min(max(rest - rank * interleave, 0), interleave)


def local_seq_lens(seq_len: int, dcp: int, interleave: int = 1) -> list[int]:
    """:func:`local_seq_len` of every rank, in rank order; they sum to ``seq_len``."""
    _require_positive(dcp=dcp)
    return [local_seq_len(seq_len, rank, dcp, interleave) for rank in range(dcp)]


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, in order."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def valid_dcp_sizes(tp: int, pcp: int) -> list[int]:
    """The DCP sizes that vLLM takes beside a TP and a PCP size, in order."""
    return sorted({1, pcp, tp * pcp}) if pcp > 1 else divisors(tp)


def check_topology(tp: int, pcp: int, dcp: int, heads: int) -> list[str]:
    """What is wrong with a topology, one sentence each; empty when vLLM accepts it.

    Args:
        tp: ``--tensor-parallel-size``.
        pcp: ``--prefill-context-parallel-size``.
        dcp: ``--decode-context-parallel-size``.
        heads: the model's query heads, before tensor parallelism.

    Returns:
        Sentences that name the flag, what was got, what is allowed and what to do.
    """
    flags = {
        "--tensor-parallel-size": tp,
        "--prefill-context-parallel-size": pcp,
        "--decode-context-parallel-size": dcp,
    }
    problems = [
        f"{flag} is {size}: it counts ranks and must be at least 1; use 1 or more."
        for flag, size in flags.items()
        if size < 1
    ]
    if heads < 1:
        problems.append(f"The model has {heads} query heads: it must have at least 1.")
    if problems:
        return problems
    if heads % tp:
        problems.append(
            f"--tensor-parallel-size is {tp}, which does not divide the model's {heads} query "
            f"heads; use one of {_listed(divisors(heads))}."
        )
    allowed = valid_dcp_sizes(tp, pcp)
    if dcp not in allowed:
        why = (
            f"must divide --tensor-parallel-size {tp}"
            if pcp == 1
            else f"must be 1, --prefill-context-parallel-size ({pcp}) or "
            f"tensor x prefill ranks ({tp * pcp})"
        )
        problems.append(
            f"--decode-context-parallel-size is {dcp}, but it {why}; use one of {_listed(allowed)}."
        )
    return problems


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))
