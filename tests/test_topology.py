import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dcp_mla import check_topology, gathered_heads, local_seq_len, local_seq_lens

SIZES = st.sampled_from([1, 2, 3, 4, 8])
INTERLEAVES = st.sampled_from([1, 2, 16, 64])


@pytest.mark.parametrize(
    ("heads_per_rank", "tp", "pcp", "dcp", "heads"),
    [
        (8, 8, 1, 8, 64),
        (8, 8, 1, 2, 16),
        (16, 8, 1, 8, 128),
        (64, 1, 4, 4, 64),  # the PCP group holds the same heads already
        (32, 2, 2, 4, 64),
        (32, 2, 2, 2, 32),
        (64, 1, 4, 1, 64),
        (8, 8, 1, 1, 8),
    ],
)
def test_gathered_heads(heads_per_rank, tp, pcp, dcp, heads):
    assert gathered_heads(heads_per_rank, tp, pcp, dcp) == heads


@pytest.mark.parametrize("bad", [(0, 1, 1, 1), (8, 0, 1, 1), (8, 1, -1, 1), (8, 1, 1, 0)])
def test_gathered_heads_refuses_sizes_below_one(bad):
    with pytest.raises(ValueError, match="at least 1, got"):
        gathered_heads(*bad)


@given(st.integers(0, 5000), SIZES, INTERLEAVES)
def test_local_lengths_count_what_a_brute_force_loop_assigns(length, dcp, interleave):
    owners = [(position // interleave) % dcp for position in range(length)]
    assert local_seq_lens(length, dcp, interleave) == [owners.count(r) for r in range(dcp)]


@given(st.integers(0, 1 << 40), SIZES, INTERLEAVES)
def test_local_lengths_sum_up_and_grow_by_one_token_on_one_rank(length, dcp, interleave):
    now = local_seq_lens(length, dcp, interleave)
    then = local_seq_lens(length + 1, dcp, interleave)
    assert sum(now) == length
    assert sorted(b - a for a, b in zip(now, then, strict=True)) == [0] * (dcp - 1) + [1]


def test_local_lengths_of_reported_cases():
    assert local_seq_lens(5, 2) == [3, 2]
    assert local_seq_lens(25, 4) == [7, 6, 6, 6]
    assert local_seq_lens(1, 8) == [1, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "bad", [(-1, 0, 1, 1), (5, 2, 2, 1), (5, -1, 2, 1), (5, 0, 0, 1), (5, 0, 1, 0)]
)
def test_local_length_refuses(bad):
    with pytest.raises(ValueError, match="got"):
        local_seq_len(*bad)


@given(SIZES, SIZES, st.integers(1, 64), st.integers(1, 256))
def test_topology_agrees_with_the_rule(tp, pcp, dcp, heads):
    fits = heads % tp == 0 and (tp % dcp == 0 if pcp == 1 else dcp in (1, pcp, tp * pcp))
    assert (check_topology(tp, pcp, dcp, heads) == []) == fits


@pytest.mark.parametrize(
    ("topology", "named"),
    [
        ((8, 1, 0, 64), ["--decode-context-parallel-size is 0"]),
        ((8, 1, -1, 64), ["--decode-context-parallel-size is -1"]),
        ((0, 0, 0, 64), ["--tensor", "--prefill", "--decode"]),
        ((8, 1, 3, 64), ["--decode-context-parallel-size is 3", "1, 2, 4, 8"]),
        ((8, 1, 16, 64), ["--decode-context-parallel-size is 16", "1, 2, 4, 8"]),
        ((2, 4, 2, 64), ["--decode-context-parallel-size is 2", "1, 4, 8"]),
        ((7, 1, 1, 64), ["--tensor-parallel-size is 7", "64"]),
        ((8, 1, 8, 0), ["0 query heads"]),
    ],
)
def test_problems_name_flag_value_and_way_out(topology, named):
    text = " ".join(check_topology(*topology))
    assert all(part in text for part in named), text
