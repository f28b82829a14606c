"""What follows a library's kernel, interpreted; tests/gpu runs it behind those libraries."""

import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from kernel_batches import make_batch  # noqa: E402

from release_marks import serves_hopper  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("cpu_vllm"), serves_hopper]


@settings(max_examples=25)
@given(
    st.lists(st.sampled_from([0, 1, 16]), min_size=1, max_size=6),
    st.sampled_from([1, 8, 64, 65, 128]),
    st.booleans(),
    st.booleans(),
)
def test_rows_with_keys_are_kept_and_others_cleared(counts, heads, want_lse, heads_first):
    from vllm_dcp_mla.kernels.finish import finish

    tokens = len(counts)
    batch = make_batch(tokens, heads, 16, counts=counts, want_lse=want_lse)
    wide = torch.full((tokens, heads + 3, 512), math.nan).bfloat16()
    batch = replace(batch, out=wide[:, :heads])
    empty = batch.counts == 0
    written = torch.randn(tokens, heads, 512).bfloat16()
    batch.out[~empty] = written[~empty]
    found = torch.randn(heads, tokens).T if heads_first else torch.randn(tokens, heads)
    found[empty] = math.inf
    kept = found.clone()
    finish(batch, found)
    assert torch.equal(batch.out[~empty], written[~empty])
    assert not batch.out[empty].any()
    assert wide[:, heads:].isnan().all()
    if want_lse:
        assert torch.equal(batch.lse[~empty], kept[~empty])
        assert (batch.lse[empty] == -math.inf).all()
