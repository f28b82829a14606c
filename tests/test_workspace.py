import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dcp_mla import plan_workspace, softmax_stats_bytes, stock_workspace_bytes
from vllm_dcp_mla.workspace import MIN_SCRATCH_BYTES, counter_bytes

HEADS = st.sampled_from([1, 8, 16, 32, 64, 128])
TOKENS = st.integers(1, 200_000)


@pytest.mark.parametrize(
    ("heads", "tokens", "expected"),
    [(64, 12_288, 1_611_661_312), (64, 3_584, 470_810_624), (64, 16_384, 2_148_532_224)],
)
def test_slab_is_what_crash_reports_show(heads, tokens, expected):
    assert softmax_stats_bytes(heads, tokens) == expected


def test_slab_rounds_query_length_up_to_256():
    assert softmax_stats_bytes(3, 5, 256) == softmax_stats_bytes(3, 5, 1)
    assert softmax_stats_bytes(3, 5, 257) - (1 << 20) == 2 * (softmax_stats_bytes(3, 5) - (1 << 20))


def test_stock_bytes():
    assert stock_workspace_bytes(8, 8, 16_384) == 2_561_671_168
    assert stock_workspace_bytes(64, 4, 32_768) == 17_594_056_704
    assert stock_workspace_bytes(8, 1, 16_384) == 413_138_944


def test_two_gib_do_not_hold_16384_tokens_of_64_heads():
    assert softmax_stats_bytes(64, 16_384) > 2 << 30
    assert softmax_stats_bytes(64, 16_376) <= 2 << 30 < softmax_stats_bytes(64, 16_377)


@pytest.mark.parametrize(("heads", "tokens"), [(64, 4096), (128, 2048)])
@pytest.mark.parametrize("max_tokens", [4096, 8192, 32_768, 1_000_000])
def test_default_total_does_not_grow_with_the_step(heads, tokens, max_tokens):
    plan = plan_workspace(heads, max_tokens)
    assert plan.tokens_per_launch == tokens
    assert plan.slab_bytes == 537_919_488
    assert plan.total_bytes == 951_058_432


def test_small_steps_get_a_small_slab():
    plan = plan_workspace(64, 1000)
    assert plan.slab_bytes == softmax_stats_bytes(64, 1000)
    assert plan.num_launches(1000) == 1


def test_users_size_is_honoured_by_splitting_finer():
    plan = plan_workspace(64, 16_384, workspace_bytes=104_857_600)
    assert plan.tokens_per_launch == 280
    assert plan.total_bytes == 104_857_600


@given(HEADS, TOKENS, st.none() | st.integers(68_419_584, 1 << 34), st.integers(0, 300_000))
def test_every_plan_fits_and_covers(heads, max_tokens, workspace_bytes, tokens):
    plan = plan_workspace(heads, max_tokens, workspace_bytes=workspace_bytes)
    assert plan.slab_bytes == softmax_stats_bytes(heads, plan.tokens_per_launch)
    assert plan.total_bytes - plan.slab_bytes >= MIN_SCRATCH_BYTES
    assert workspace_bytes in (None, plan.total_bytes)
    launches = plan.launches(tokens)
    assert len(launches) == plan.num_launches(tokens)
    assert sum(s.stop - s.start for s in launches) == tokens
    assert all(0 < s.stop - s.start <= plan.tokens_per_launch for s in launches)
    assert all(a.stop == b.start for a, b in itertools.pairwise(launches))


@given(HEADS)
def test_one_token_must_fit_to_the_byte(heads):
    needed = MIN_SCRATCH_BYTES + softmax_stats_bytes(heads, 1)
    assert plan_workspace(heads, 100, workspace_bytes=needed).tokens_per_launch == 1
    with pytest.raises(ValueError, match=str(needed)):
        plan_workspace(heads, 100, workspace_bytes=needed - 1)
    with pytest.raises(ValueError, match="slab_limit_bytes"):
        plan_workspace(heads, 100, slab_limit_bytes=softmax_stats_bytes(heads, 1) - 1)


@pytest.mark.parametrize("bad", [(0, 1), (1, 0), (-1, 5)])
def test_counts_below_one_are_refused(bad):
    with pytest.raises(ValueError, match="at least 1"):
        plan_workspace(*bad)


def test_counters_cover_tokens_and_multiprocessors():
    assert counter_bytes(64, 4096, 148) == 64 * 4096 * 4
    assert counter_bytes(1, 3, 148) == 152 * 4
