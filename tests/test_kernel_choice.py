import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dcp_mla.kernel_choice import PREFERENCES, kernels_by_tokens
from vllm_dcp_mla.key_splits import ANY

OURS, FIRST, SECOND = "triton_decode", "flashmla", "flash_attn3"


@pytest.mark.parametrize("heads", [33, 64, 65, 128])
def test_what_is_not_there_is_passed_over(heads):
    blocks = -(-heads // 64)
    everything = (OURS, FIRST, SECOND)
    assert kernels_by_tokens(heads, 512, everything) == ((8 // blocks, OURS), (ANY, FIRST))
    assert kernels_by_tokens(heads, 1024, everything) == (
        *((2 // blocks, OURS), (512 // blocks, FIRST), (ANY, SECOND)),
    )
    assert kernels_by_tokens(heads, 1024, (OURS, SECOND)) == ((2 // blocks, OURS), (ANY, SECOND))
    assert kernels_by_tokens(heads, 2048, (OURS, SECOND)) == ((4 // blocks, OURS), (ANY, SECOND))
    assert kernels_by_tokens(heads, 512, (OURS,)) == ((ANY, OURS),)


@pytest.mark.parametrize("heads", [1, 16, 32])
def test_few_heads_do_not_fill_flashmlas_tiles(heads):
    everything = (OURS, FIRST, SECOND)
    assert kernels_by_tokens(heads, 1024, everything) == ((8, OURS), (ANY, SECOND))
    assert kernels_by_tokens(heads, 512, (OURS, FIRST)) == ((8, OURS), (ANY, FIRST))


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
    ("tokens", "rows", "fastest"),
    [
        *((1, 256, OURS), (16, 256, FIRST), (1, 512, OURS), (16, 512, FIRST), (24, 512, FIRST)),
        *((2, 1024, OURS), (16, 1024, FIRST), (48, 1024, FIRST), (1024, 1024, SECOND)),
        *((1, 2048, OURS), (16, 2048, FIRST), (128, 2048, FIRST), (4096, 2048, SECOND)),
    ],
)
def test_the_dispatch_takes_the_fastest_that_was_measured(tokens, rows, fastest):
    steps = kernels_by_tokens(64, rows, (OURS, FIRST, SECOND))
    assert next(name for most, name in steps if tokens <= most) == fastest


def test_the_table_ends_with_every_kernel_for_any_launch():
    last = [(line.heads, line.rows, line.blocks) for line in PREFERENCES[-3:]]
    assert last == [(ANY, ANY, ANY)] * 3
    assert {line.kernel for line in PREFERENCES[-3:]} == {OURS, FIRST, SECOND}
