"""Our Triton kernel, interpreted; the same bodies run compiled in tests/gpu."""

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from kernel_batches import NOPE, ROPE  # noqa: E402
from kernel_checks import CACHES, agrees_with_float64  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("cpu_vllm")]


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
