import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dcp_mla.key_splits import BLOCK_HEADS, head_blocks, num_splits, partial_bytes

SHAPES = (st.integers(0, 5000), st.integers(1, 300), st.integers(1, 4096), st.integers(1, 160))


@given(*SHAPES)
def test_partial_results_fit_whatever_the_launch_is(tokens, heads, topk, sms):
    splits = num_splits(tokens, heads, topk, sms)
    assert splits >= 1
    if splits > 1:
        assert tokens * head_blocks(heads) * splits <= sms
        assert tokens * splits * heads * (512 + 1) * 4 <= partial_bytes(512, sms)


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
    assert num_splits(tokens, heads, topk, 132) == splits


def test_heads_are_attended_in_blocks():
    assert [head_blocks(h) for h in (1, BLOCK_HEADS, BLOCK_HEADS + 1)] == [1, 1, 2]
