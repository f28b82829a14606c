import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dcp_mla.gather_plan import (
    DEFAULT_GATHER_LIMIT_BYTES,
    PAGE_ROWS,
    plan_chunks,
    plan_gather,
)
from vllm_dcp_mla.topology import local_seq_len

GIB = 1 << 30
GLM = {
    "limit_bytes": DEFAULT_GATHER_LIMIT_BYTES,
    "row_bytes": 576,
    "dcp": 4,
    "interleave": 1,
    "max_model_len": 1 << 20,
    "max_num_seqs": 1024,
    "max_num_tokens": 32_768,
    "heads": 64,
    "latent_dim": 512,
}


def plan(**changes):
    return plan_gather(**{**GLM, **changes})


def test_the_default_limit_holds_at_a_million_tokens():
    made = plan()
    assert DEFAULT_GATHER_LIMIT_BYTES == GIB // 2
    assert made.total_bytes <= GIB // 2
    assert made.total_bytes > GIB // 2 - 64 * 576
    assert made.merge_tokens == 1024  # an eighth, of 64 KiB a token
    assert (made.rows_per_rank * 4, plan(row_bytes=1152).rows_per_rank * 4) == (815_552, 407_744)


def test_contexts_that_always_fit_need_no_room_for_partial_results():
    made = plan(max_model_len=131_072, max_num_seqs=3)
    assert made.merge_tokens == 0
    assert made.rows_per_rank == 3 * 32_768
    assert made.total_bytes == made.key_bytes == 3 * 131_072 * 576


def test_a_workspace_that_is_there_takes_the_limits_place():
    assert plan(workspace_bytes=1 << 26).total_bytes <= 1 << 26
    assert plan(workspace_bytes=1 << 26) == plan(limit_bytes=1 << 26)


@pytest.mark.parametrize("interleave", [1, 64])
def test_a_limit_too_small_names_the_bytes_that_suffice(interleave):
    pages = -(-4 * interleave // PAGE_ROWS) * PAGE_ROWS
    needed = pages * 576 + 64 * 512 * 2
    assert plan(interleave=interleave, limit_bytes=needed).rows_per_rank >= interleave
    with pytest.raises(ValueError, match=f"is {needed - 1}, but .* need {needed} bytes; raise"):
        plan(interleave=interleave, limit_bytes=needed - 1)


SIZES = {
    "limit_bytes": st.integers(1, 1 << 32),
    "row_bytes": st.sampled_from([512, 576, 1152]),
    "dcp": st.sampled_from([2, 3, 4, 8, 16]),
    "interleave": st.sampled_from([1, 2, 16, 64]),
    "max_model_len": st.integers(1, 1 << 20),
    "max_num_seqs": st.integers(1, 1024),
    "max_num_tokens": st.integers(1, 1 << 16),
    "heads": st.sampled_from([1, 8, 64, 128]),
}


@given(
    st.fixed_dictionaries({**SIZES, "limit_bytes": st.just(1 << 40)}),
    st.integers(1, 2000),
    st.integers(1, 3),
    SIZES["interleave"],
)
def test_a_workspace_of_no_limit_holds_requests_with_every_interleave(sizes, length, seqs, other):
    """vLLM may settle on another one when the workspace is made already."""
    sizes = {**sizes, "max_model_len": length, "max_num_seqs": seqs}
    made = plan(**sizes)
    later = plan(**{**sizes, "interleave": other}, workspace_bytes=made.total_bytes)
    assert made.merge_tokens == later.merge_tokens == 0
    assert later.rows_per_rank >= local_seq_len(length, 0, sizes["dcp"], other)
    assert later.total_bytes <= made.total_bytes


def test_a_workspace_that_holds_no_turn_is_no_limit():
    with pytest.raises(
        ValueError, match="the gather workspace has 70000, but 64 rows of each of 4"
    ):
        plan(interleave=64, workspace_bytes=70_000)


@given(st.fixed_dictionaries(SIZES))
def test_a_plan_fits_its_limit_or_names_one_that_suffices(sizes):
    try:
        made = plan(**sizes)
    except ValueError as error:
        needed = int(re.search(r"need (\d+) bytes", str(error))[1])
        assert sizes["limit_bytes"] < needed
        made = plan(**{**sizes, "limit_bytes": needed})
        assert sizes["interleave"] <= made.rows_per_rank
        assert made.total_bytes <= needed
        return
    assert made.total_bytes <= sizes["limit_bytes"]
    assert made.key_bytes % (PAGE_ROWS * sizes["row_bytes"]) == 0
    assert made.rows_per_rank * sizes["dcp"] * sizes["row_bytes"] <= made.key_bytes
    assert made.rows_per_rank % sizes["interleave"] == 0
    longest = local_seq_len(sizes["max_model_len"], 0, sizes["dcp"], sizes["interleave"])
    cut = any(not c.whole for c in plan_chunks([longest], made.rows_per_rank, sizes["interleave"]))
    assert cut is (made.merge_tokens > 0)


@given(
    st.lists(st.integers(1, 200), max_size=12),
    st.integers(1, 40),
    st.sampled_from([1, 4, 64]),
    st.sampled_from([1, 2, 4, 8]),
    st.none() | st.integers(0, 300),
)
def test_chunks_hold_every_row_once_and_every_position_in_its_range(
    lengths, turns, interleave, dcp, together
):
    capacity = turns * interleave
    shares = [local_seq_len(length, 0, dcp, interleave) for length in lengths]
    chunks = plan_chunks(shares, capacity, interleave, most_together=together)
    seen = []
    for chunk in chunks:
        first, last = chunk.requests
        assert len(chunk.rows) == last - first
        assert 0 < chunk.rows_per_rank <= capacity
        assert len(chunk.rows) == 1 or together is None or chunk.rows_per_rank <= together
        if chunk.whole:
            assert chunk.start == 0
            seen += [(r, row) for r, n in zip(range(first, last), chunk.rows, strict=True)
                     for row in range(n)]  # fmt: skip
            continue
        assert last == first + 1
        seen += [(first, row) for row in range(chunk.start, chunk.start + chunk.rows_per_rank)]
        low, high = chunk.positions(dcp, interleave)
        for position in range(lengths[first]):
            local = position // (dcp * interleave) * interleave + position % interleave
            inside = chunk.start <= local < chunk.start + chunk.rows_per_rank
            # A share may end inside its last turn, where other ranks have fewer rows still.
            assert inside is (low <= position < high)
    assert seen == [(r, row) for r, share in enumerate(shares) for row in range(share)]


def test_chunks_are_full_where_requests_allow_it():
    chunks = plan_chunks([3, 3, 3, 25, 2, 8], 10, 1)
    assert [(c.requests, c.rows, c.start, c.whole) for c in chunks] == [
        ((0, 3), (3, 3, 3), 0, True),
        ((3, 4), (10,), 0, False),
        ((3, 4), (10,), 10, False),
        ((3, 4), (5,), 20, False),
        ((4, 6), (2, 8), 0, True),
    ]
    assert plan_chunks([], 10, 1) == []


def test_fewer_rows_share_a_chunk_where_that_is_asked_for():
    chunks = plan_chunks([3, 3, 1, 9, 2, 12, 2, 3], 10, 1, most_together=6)
    assert [(c.requests, c.rows, c.start, c.whole) for c in chunks] == [
        ((0, 2), (3, 3), 0, True),
        ((2, 3), (1,), 0, True),
        ((3, 4), (9,), 0, True),
        ((4, 5), (2,), 0, True),
        ((5, 6), (10,), 0, False),
        ((5, 6), (2,), 10, False),
        ((6, 8), (2, 3), 0, True),
    ]


def test_a_capacity_of_broken_turns_is_refused():
    with pytest.raises(ValueError, match="rows_per_rank is 10, not a multiple of 4"):
        plan_chunks([3], 10, 4)
