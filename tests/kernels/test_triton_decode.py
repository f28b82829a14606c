"""Our Triton kernel, interpreted; the same bodies run compiled in tests/gpu."""

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from kernel_batches import NOPE, ROPE, make_batch, make_partials  # noqa: E402
from kernel_checks import CACHES, agrees_with_float64, check  # noqa: E402

from release_marks import serves_hopper  # noqa: E402
from vllm_dcp_mla.key_splits import Tiling  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("cpu_vllm"), serves_hopper]


def kernel(num_sms=8, tiling=None):
    from vllm_dcp_mla.kernels.triton_decode import TritonDecodeKernel

    return TritonDecodeKernel(num_sms, tiling=tiling)


#: Every size of a block, each merged in both ways; few parts and more than are unrolled.
TILINGS = [
    None,
    Tiling(heads=16, keys=16, blocks_per_sm=4, splits=64),
    Tiling(heads=16, keys=16, blocks_per_sm=4, splits=64, merges_in_launch=True),
    Tiling(heads=32, keys=32, blocks_per_sm=2, merges_in_launch=True),
    Tiling(merges_in_launch=True),
]


@settings(max_examples=25)
@given(
    st.integers(1, 5),
    st.sampled_from([1, 7, 64, 65]),
    st.sampled_from([1, 63, 200]),
    st.sampled_from(sorted(CACHES)),
    st.sampled_from([ROPE, NOPE]),
    st.sampled_from([1, 4, 13]),
    st.sampled_from(TILINGS),
    st.integers(0, 2**31),
)
def test_agrees_with_float64(tokens, heads, topk, cache, dims, num_sms, tiling, seed):
    made = kernel(num_sms, tiling)
    agrees_with_float64(
        made, tokens, heads, topk, cache=cache, dims=dims, num_sms=num_sms, seed=seed
    )


@pytest.mark.parametrize("num_sms", [1, 8])
@pytest.mark.parametrize("tiling", [TILINGS[0], TILINGS[-1]])
@pytest.mark.parametrize("where", ["query", "key"])
def test_what_is_no_number_is_not_hidden(num_sms, tiling, where):
    batch = make_batch(2, 9, 200, counts=[200, 0])
    if where == "query":
        batch.query[0, 3, 7] = float("nan")
    else:
        batch.cache_rows[batch.topk[0, 150], 7] = float("nan")
    kernel(num_sms, tiling).launch(batch, make_partials(8))
    assert batch.out[0, 3].isnan().any()
    assert batch.lse[0, 3].isnan()
    assert not batch.out[1].any()


@pytest.mark.parametrize("cache", sorted(CACHES))
@pytest.mark.parametrize("splits", [2, 3, 4])
@pytest.mark.parametrize("merges_in_launch", [False, True])
def test_parts_of_a_row_are_merged_whatever_its_length(cache, splits, merges_in_launch):
    """Up to a block a part, rows that end in it, and rows too short for the last parts."""
    counts = [0, 1, 63, 64, 65, 128, 129, 200, 256]
    for count in counts:
        agrees_with_float64(
            kernel(2 * splits, Tiling(merges_in_launch=merges_in_launch)),
            *(2, 9, 256),
            cache=cache,
            counts=[count, 256 - count],
            num_sms=8,
        )


def test_the_last_arrival_leaves_the_counters_as_the_next_launch_expects_them():
    """A CUDA graph replays launches with nothing between them."""
    made = kernel(8, Tiling(heads=16, keys=16, blocks_per_sm=4, merges_in_launch=True))
    buffers = make_partials(8)
    for seed in range(3):
        batch = make_batch(3, 33, 200, seed=seed, counts=[200, 0, 17 * seed])
        made.launch(batch, buffers)
        check(made, batch)
        assert not buffers.counters.any()
