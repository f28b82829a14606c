import pytest

torch = pytest.importorskip("torch")
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from vllm_dcp_mla.indexer.lengths import local_lengths  # noqa: E402
from vllm_dcp_mla.topology import local_seq_len  # noqa: E402


@given(
    st.lists(st.integers(0, 1 << 20), min_size=1, max_size=8),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 64]),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_agrees_with_the_scalar_formula(lengths, dcp, interleave, dtype):
    tensor = torch.tensor(lengths, dtype=dtype)
    for rank in range(dcp):
        local = local_lengths(tensor, rank, dcp, interleave)
        assert local.dtype == dtype
        assert local.tolist() == [local_seq_len(n, rank, dcp, interleave) for n in lengths]
    assert tensor.tolist() == lengths


def test_rank_0_has_most():
    lengths = torch.arange(0, 700)
    most = local_lengths(lengths, 0, 8, 64)
    for rank in range(8):
        assert (local_lengths(lengths, rank, 8, 64) <= most).all()
