import math
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_dcp_mla import key_splits
from vllm_dcp_mla.bench.candidates import CANDIDATES
from vllm_dcp_mla.key_splits import (
    ANY,
    CHOICES,
    Choice,
    Tiling,
    arrival_bytes,
    head_blocks,
    num_splits,
    num_spreads,
    partial_bytes,
    spread_width,
    tiling_for,
    tilings_of,
)

SHAPES = (st.integers(0, 5000), st.integers(1, 300), st.integers(1, 4096), st.integers(1, 160))
TILINGS = [*{c.tiling for c in CHOICES}, *CANDIDATES]


@given(*SHAPES, st.sampled_from(TILINGS))
def test_partial_results_and_arrivals_fit_whatever_the_launch_is(tokens, heads, topk, sms, tiling):
    splits = num_splits(tokens, heads, topk, sms, tiling)
    assert 1 <= splits <= tiling.splits
    if splits > 1:
        blocks = tokens * head_blocks(heads, tiling.heads)
        assert blocks * splits <= sms * tiling.blocks_per_sm
        assert tokens * splits * heads * (512 + 1) * 4 <= partial_bytes(512, sms)
        assert blocks * 4 <= arrival_bytes(sms)


@pytest.mark.parametrize(
    ("tokens", "heads", "topk", "splits"),
    [
        (1, 64, 2048, 32),
        (1, 64, 512, 8),
        (1, 128, 2048, 32),
        (8, 64, 2048, 16),
        (64, 64, 2048, 2),
        (67, 64, 2048, 1),
        (4096, 64, 2048, 1),
        (32, 128, 2048, 2),
        (3, 1, 64, 1),
    ],
)
def test_splits_on_an_h200(tokens, heads, topk, splits):
    assert num_splits(tokens, heads, topk, 132, Tiling()) == splits


@given(*SHAPES[:3], st.integers(1, 4096), SHAPES[3])
def test_spread_parts_fit_whatever_the_launch_is(tokens, heads, topk, rows, sms):
    parts = num_spreads(tokens, heads, topk, rows, sms)
    assert parts >= 1
    if parts > 1:
        assert tokens * head_blocks(heads) * parts <= sms
        assert tokens * parts * heads * (512 + 576) * 2 <= partial_bytes(512, sms)
        width = spread_width(topk, parts)
        assert width % 128 == 0
        # The largest part of a row of any length.
        assert all(math.ceil(n / parts / 128) * 128 <= width for n in (1, topk // 2, topk))


@pytest.mark.parametrize(
    ("tokens", "rows", "parts"),
    [
        *((1, 2048, 16), (8, 2048, 16), (16, 2048, 8), (64, 2048, 2), (67, 2048, 1)),
        *((1, 1024, 9), (32, 1024, 4), (48, 1024, 2), (64, 1024, 1)),
        *((1, 512, 5), (32, 512, 4), (48, 512, 1), (1, 256, 1), (1, 128, 1)),
    ],
)
def test_spreads_on_an_h200(tokens, rows, parts):
    assert num_spreads(tokens, 64, 2048, rows, 132) == parts


def test_smaller_blocks_of_heads_share_an_sm():
    small = Tiling(heads=16, keys=32, warps=4, blocks_per_sm=4, splits=64)
    assert num_splits(1, 64, 2048, 132, small) == 64
    assert num_splits(1, 64, 2048, 132, replace(small, splits=8)) == 8
    assert num_splits(16, 64, 2048, 132, small) == 8


def test_heads_are_attended_in_blocks():
    assert [head_blocks(h) for h in (1, 64, 65)] == [1, 1, 2]
    assert head_blocks(64, 16) == 4


def test_a_tiling_that_its_memory_does_not_hold_is_refused():
    for wrong in ({"heads": 32, "blocks_per_sm": 3}, {"splits": 65}):
        with pytest.raises(ValueError, match="more than 64"):
            Tiling(**wrong)


@given(*SHAPES[:3])
@example(tokens=0, heads=236, rows=556)
def test_every_launch_has_a_tiling_and_it_is_warmed(tokens, heads, rows):
    assert tiling_for(tokens, heads, rows) in tilings_of(heads, rows)


def test_the_first_choice_that_holds_is_taken(monkeypatch):
    few, small, rest = Tiling(heads=16), Tiling(heads=32), Tiling()
    choices = (
        Choice(8 * 64 * 512, few),
        Choice(64 * 64 * 512, small),
        Choice(64 * 64 * 512 + 1, few),
        Choice(ANY, rest),
    )
    monkeypatch.setattr(key_splits, "CHOICES", choices)
    assert [tiling_for(t, 64, 512) for t in (1, 8, 9, 64, 65)] == [few, few, small, small, rest]
    assert [tiling_for(t, 128, 2048) for t in (1, 2, 8, 9)] == [few, small, small, rest]
    assert tilings_of(64, 512) == (few, small, rest)
    assert tilings_of(128, 4096) == (small, few, rest)
    assert tilings_of(128, 1 << 20) == (rest,)


@pytest.mark.parametrize(
    ("tokens", "heads", "rows", "block"),
    [
        *((1, 64, 512, 16), (4, 64, 512, 16), (16, 64, 512, 32), (32, 64, 512, 64)),
        *((1, 64, 2048, 16), (4, 64, 2048, 32), (16, 64, 2048, 64)),
        *((1, 128, 512, 16), (4, 128, 512, 32), (16, 128, 512, 64)),
        *((1, 128, 2048, 32), (4, 128, 2048, 64)),
    ],
)
def test_tilings_are_the_fastest_that_were_measured(tokens, heads, rows, block):
    assert tiling_for(tokens, heads, rows).heads == block
