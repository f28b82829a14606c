"""Our Triton kernel, interpreted; the same bodies run compiled in tests/gpu."""

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from kernel_batches import NOPE, ROPE  # noqa: E402
from kernel_checks import CACHES, agrees_with_float64  # noqa: E402

from release_marks import serves_hopper  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("cpu_vllm"), serves_hopper]


def kernel(num_sms=8):
    from vllm_dcp_mla.kernels import load_kernel

    return load_kernel("triton_decode", num_sms=num_sms)


@settings(max_examples=25)
@given(
    st.integers(1, 5),
    st.sampled_from([1, 7, 64, 65]),
    st.sampled_from([1, 63, 200]),
    st.sampled_from(sorted(CACHES)),
    st.sampled_from([ROPE, NOPE]),
    st.sampled_from([1, 4, 13]),
    st.integers(0, 2**31),
)
def test_agrees_with_float64(tokens, heads, topk, cache, dims, num_sms, seed):
    agrees_with_float64(
        kernel(num_sms), tokens, heads, topk, cache=cache, dims=dims, num_sms=num_sms, seed=seed
    )


@pytest.mark.parametrize("cache", sorted(CACHES))
@pytest.mark.parametrize("splits", [2, 3, 4])
def test_parts_of_a_row_are_merged_whatever_its_length(cache, splits):
    """Up to a block a part, rows that end in it, and rows too short for the last parts."""
    counts = [0, 1, 63, 64, 65, 128, 129, 200, 256]
    for count in counts:
        agrees_with_float64(
            kernel(2 * splits), 2, 9, 256, cache=cache, counts=[count, 256 - count], num_sms=8
        )
