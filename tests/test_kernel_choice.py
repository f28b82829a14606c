import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dcp_mla.kernel_choice import PREFERENCES, kernels_by_tokens, widens
from vllm_dcp_mla.key_splits import ANY

OURS, FIRST, SECOND = "triton_decode", "flashmla", "flash_attn3"


@pytest.mark.parametrize("heads", [33, 64, 65, 128])
def test_what_is_not_there_is_passed_over(heads):
    blocks = -(-heads // 64)
    everything = (OURS, FIRST, SECOND)
    assert kernels_by_tokens(heads, 512, everything) == ((8 // blocks, OURS), (ANY, FIRST))
    assert kernels_by_tokens(heads, 1024, everything) == ((4 // blocks, OURS), (ANY, FIRST))
    assert kernels_by_tokens(heads, 1024, (OURS, SECOND)) == ((4 // blocks, OURS), (ANY, SECOND))
    assert kernels_by_tokens(heads, 2048, (OURS, SECOND)) == ((4 // blocks, OURS), (ANY, SECOND))
    assert kernels_by_tokens(heads, 512, (OURS,)) == ((ANY, OURS),)


def test_one_token_of_two_blocks_of_heads():
    assert kernels_by_tokens(128, 2048, (OURS, FIRST, SECOND)) == ((ANY, FIRST),)
    assert kernels_by_tokens(64, 2048, (OURS, FIRST, SECOND)) == ((1, OURS), (ANY, FIRST))


@pytest.mark.parametrize("heads", [1, 16, 32])
def test_few_heads_do_not_fill_flashmlas_tiles(heads):
    everything = (OURS, FIRST, SECOND)
    assert kernels_by_tokens(heads, 512, everything) == ((32, OURS), (ANY, SECOND))
    assert kernels_by_tokens(heads, 1024, everything) == ((16, OURS), (ANY, SECOND))
    assert kernels_by_tokens(heads, 1024, (OURS, FIRST)) == ((64, OURS), (ANY, FIRST))


@given(
    st.integers(1, 300), st.integers(1, 4096), st.sets(st.sampled_from((FIRST, SECOND)), max_size=2)
)
def test_every_launch_has_a_kernel_that_is_there(heads, rows, shipped):
    steps = kernels_by_tokens(heads, rows, {OURS, *shipped})
    most = [tokens for tokens, _ in steps]
    assert most == sorted(set(most))
    assert most[-1] == ANY
    assert {name for _, name in steps} <= {OURS, *shipped}
    assert all(a != b for (_, a), (_, b) in itertools.pairwise(steps))


@pytest.mark.parametrize(
    ("heads", "rows", "tokens", "fastest"),
    [
        *((64, 256, 1, OURS), (64, 256, 16, FIRST), (64, 512, 4, OURS), (64, 512, 16, FIRST)),
        *((64, 1024, 2, OURS), (64, 1024, 8, FIRST), (64, 1024, 1024, FIRST)),
        *((64, 2048, 1, OURS), (64, 2048, 4, FIRST), (64, 2048, 128, FIRST)),
        *((128, 512, 2, OURS), (128, 512, 8, FIRST), (128, 2048, 2, FIRST)),
        *((32, 512, 24, OURS), (32, 512, 64, SECOND), (16, 1024, 8, OURS), (16, 1024, 24, SECOND)),
    ],
)
def test_the_dispatch_takes_the_fastest_that_was_measured(heads, rows, tokens, fastest):
    steps = kernels_by_tokens(heads, rows, (OURS, FIRST, SECOND))
    assert next(name for most, name in steps if tokens <= most) == fastest


@pytest.mark.parametrize(
    ("tokens", "keys", "rows", "pays"),
    [
        *((128, 1 << 16, 1 << 13, True), (127, 1 << 16, 1 << 13, False)),
        *((8192, 1 << 22, 1 << 16, True), (256, 1 << 16, 1 << 16, False)),
        (256, 1 << 13, 0, False),
    ],
)
def test_a_prefill_widens_where_its_tokens_attend_a_row_more_than_once(tokens, keys, rows, pays):
    assert widens(tokens, keys, rows) is pays


def test_every_kernel_has_a_line_for_any_launch():
    found = {p.kernel for p in PREFERENCES if (p.heads, p.rows, p.blocks) == (ANY, ANY, ANY)}
    assert found == {OURS, FIRST, SECOND}
    assert PREFERENCES[-1].kernel == OURS, "what is always there is last"
