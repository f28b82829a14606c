"""How many rows of a prefill chunk may exchange their top-k candidates: arithmetic only.

Each rank packs ``rows x top-k`` candidates of 8 bytes (score, token) and gathers those of all DCP
ranks. vLLM bounds neither and its memory profiling sees neither.
"""

from __future__ import annotations

_CANDIDATE_BYTES = 8  # a float32 score and an int32 token


def exchange_bytes(rows: int, topk: int, dcp: int) -> int:
    """Bytes that a rank holds while ``rows`` rows exchange candidates: its own and the gathered."""
    return rows * topk * _CANDIDATE_BYTES * (1 + dcp)


def max_rows(limit_bytes: int, topk: int, dcp: int) -> int:
    """Most rows of a chunk whose exchange fits.

    Raises:
        ValueError: not one row fits; the message names the bytes that one needs.
    """
    needed = exchange_bytes(1, topk, dcp)
    if limit_bytes < needed:
        raise ValueError(
            f"merge_limit_bytes is {limit_bytes}, but one row of top-k {topk} at dcp {dcp} needs "
            f"{needed} bytes; raise merge_limit_bytes (VLLM_DCP_MLA_MERGE_LIMIT_BYTES)."
        )
    return limit_bytes // needed


def bound_chunks(chunks: list[tuple[slice, slice]], rows: int) -> list[tuple[slice, slice]]:
    """Cuts chunks of more than ``rows`` query rows into smaller ones of the same requests.

    Args:
        chunks: (requests, query rows of them) of each chunk, in order.
        rows: most query rows of a chunk.
    """
    return [
        (requests, slice(start, min(start + rows, queries.stop)))
        for requests, queries in chunks
        for start in range(queries.start, queries.stop, rows)
    ]
