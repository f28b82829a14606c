"""How prefill rows see the whole context under PCP with DCP: arithmetic only.

A prefill row is on one rank, its request's keys are on all. Every rank sends its share of them as
raw cache rows into a workspace of a bounded size, which holds them rank by rank:

    rank 0: request a, request b, ... | rank 1: request a, request b, ... | ...

Requests are packed into chunks that fit. A request that does not fit alone is cut into ranges of
its keys; its rows attend one range after the other, and the parts are merged by their log-sum-exp
(LSE). All of it follows from lengths that every rank knows of every request, so that all ranks make
the same chunks without a word.

Lengths here are shares: the rows that the fullest rank, rank 0, stores of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .topology import local_seq_len

#: A GLM-5.2 context of 815,000 tokens in fp8_e4m3, of 407,000 in bfloat16.
DEFAULT_GATHER_LIMIT_BYTES = 512 << 20
#: Rows of a page: kernels read whole pages.
PAGE_ROWS = 64
#: Most of the workspace that partial results take, as one part of so many.
_MERGE_SHARE = 8
_OUT_BYTES = 2  # bf16


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """What a workspace holds.

    Attributes:
        rows_per_rank: most cache rows that each rank sends at a time; whole turns of the
            interleave.
        key_bytes: the gathered rows of all ranks, in whole pages; the front of the workspace.
        merge_tokens: query tokens whose partial results fit behind them; 0 where every request fits
            as a whole.
        total_bytes: the whole workspace.
    """

    rows_per_rank: int
    key_bytes: int
    merge_tokens: int
    total_bytes: int


def plan_gather(
    *,
    limit_bytes: int,
    row_bytes: int,
    dcp: int,
    interleave: int,
    max_model_len: int,
    max_num_seqs: int,
    max_num_tokens: int,
    heads: int,
    latent_dim: int,
    workspace_bytes: int | None = None,
) -> GatherPlan:
    """Sizes the workspace of a rank; no larger than all requests of a step can need.

    Args:
        limit_bytes: most bytes of the workspace (the setting ``gather_limit_bytes``).
        row_bytes: bytes of a cache row.
        dcp: ranks that share a request's cache.
        interleave: tokens a rank stores before the next takes over.
        max_model_len: most tokens of a request.
        max_num_seqs: most requests of a step.
        max_num_tokens: most query tokens of a step.
        heads: query heads of one rank.
        latent_dim: elements of a head's result.
        workspace_bytes: a workspace that is there already; it takes the limit's place.

    Raises:
        ValueError: not one turn of the interleave fits; the message names the bytes needed.
    """
    space = limit_bytes if workspace_bytes is None else workspace_bytes
    out_bytes = heads * latent_dim * _OUT_BYTES

    def rows_in(size: int) -> int:
        pages = max(size, 0) // (PAGE_ROWS * row_bytes)
        return pages * PAGE_ROWS // dcp // interleave * interleave

    def key_bytes(rows: int) -> int:
        return -(-rows * dcp // PAGE_ROWS) * PAGE_ROWS * row_bytes

    longest = _whole_turns(local_seq_len(max_model_len, 0, dcp, interleave), interleave)
    # In whole pages: as much as with any other interleave, should vLLM settle on another.
    most = _whole_turns(longest, max(interleave, PAGE_ROWS)) * max_num_seqs
    rows, merge_tokens = min(rows_in(space), most), 0
    if rows < longest:
        room = min(space // _MERGE_SHARE, space - key_bytes(interleave))
        merge_tokens = max(min(room // out_bytes, max_num_tokens), 1)
        rows = rows_in(space - merge_tokens * out_bytes)
    if rows < interleave:
        found = "gather_limit_bytes is" if workspace_bytes is None else "the gather workspace has"
        raise ValueError(
            f"{found} {space}, but {interleave} rows of each of {dcp} ranks and the partial result "
            f"of one token need {key_bytes(interleave) + out_bytes} bytes; raise "
            "gather_limit_bytes (VLLM_DCP_MLA_GATHER_LIMIT_BYTES)."
        )
    keys = key_bytes(rows)
    return GatherPlan(rows, keys, merge_tokens, keys + merge_tokens * out_bytes)


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is gathered at a time.

    Attributes:
        requests: first request and the one behind the last.
        rows: rows that each rank sends of each request, in order.
        start: the first of them; 0 but for a later range of a request that was cut.
        whole: whether the requests are here with all their keys.
    """

    requests: tuple[int, int]
    rows: tuple[int, ...]
    start: int = 0
    whole: bool = True

    @property
    def rows_per_rank(self) -> int:
        """Rows that each rank sends."""
        return sum(self.rows)

    def positions(self, dcp: int, interleave: int) -> tuple[int, int]:
        """The first token position of the chunk's range, and the one behind the last.

        Ranges begin with a turn of the interleave, so that one range of every rank's rows is one
        range of positions. It may end behind the request's last token.
        """
        stop = _whole_turns(self.start + self.rows_per_rank, interleave)
        return self.start * dcp, stop * dcp


def plan_chunks(
    shares: Sequence[int],
    rows_per_rank: int,
    interleave: int,
    *,
    most_together: int | None = None,
) -> list[Chunk]:
    """Packs requests into chunks, in order, and cuts those that do not fit.

    Args:
        shares: each request's rows on the fullest rank.
        rows_per_rank: most rows that a rank sends at a time; whole turns of the interleave.
        interleave: tokens a rank stores before the next takes over.
        most_together: most rows of requests that share a chunk; None for ``rows_per_rank``.

    Returns:
        Chunks that hold every row of every request once. Chunks of a request that was cut are next
        to each other and hold no other request.

    Raises:
        ValueError: a capacity that is not whole turns.
    """
    if rows_per_rank < 1 or rows_per_rank % interleave:
        raise ValueError(f"rows_per_rank is {rows_per_rank}, not a multiple of {interleave}")
    together = rows_per_rank if most_together is None else min(rows_per_rank, most_together)
    chunks: list[Chunk] = []
    packed: list[int] = []
    taken = 0

    def close(request: int) -> None:
        if packed:
            chunks.append(Chunk((request - len(packed), request), tuple(packed)))
            packed.clear()

    for request, share in enumerate(shares):
        if taken + share > together:
            close(request)
            taken = 0
        if share <= rows_per_rank:
            packed.append(share)
            taken += share
            continue
        for start in range(0, share, rows_per_rank):
            rows = min(rows_per_rank, share - start)
            chunks.append(Chunk((request, request + 1), (rows,), start, whole=False))
    close(len(shares))
    return chunks


def _whole_turns(rows: int, interleave: int) -> int:
    return -(-rows // interleave) * interleave
