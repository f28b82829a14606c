"""The Triton kernel, interpreted, against its plain torch reference."""

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("cpu_vllm")]
POISON = -77


@settings(max_examples=30)
@given(
    query_lens=st.lists(st.integers(1, 2500), min_size=1, max_size=4),
    contexts=st.lists(st.integers(0, 2500), min_size=4, max_size=4),
    dcp=st.sampled_from([1, 2, 4, 8]),
    rank=st.integers(0, 7),
    interleave=st.sampled_from([1, 3, 64]),
    ratio=st.sampled_from([1, 4]),
    origin=st.integers(0, 30),
    workers=st.sampled_from([1, 3]),
)
def test_agrees_with_the_reference(
    query_lens, contexts, dcp, rank, interleave, ratio, origin, workers
):
    from vllm_dcp_mla.indexer.chunk_kernel import CHUNK_BOUNDS_KERNEL, reference_chunk_bounds

    starts = torch.tensor([0, *query_lens]).cumsum(0).int() + origin
    lengths = torch.tensor([c + q for c, q in zip(contexts, query_lens, strict=False)]).int()
    cumulative = torch.cat((torch.zeros(1), (lengths // ratio).cumsum(0))).int()
    rows = sum(query_lens)
    written = []
    for write_bounds, more in (
        (reference_chunk_bounds, {}),
        (CHUNK_BOUNDS_KERNEL, {"workers": workers}),
    ):
        outputs = {
            "token_to_seq": torch.full((int(cumulative[-1]),), POISON, dtype=torch.int32),
            "key_start": torch.full((rows,), POISON, dtype=torch.int32),
            "key_end": torch.full((rows,), POISON, dtype=torch.int32),
        }
        write_bounds(
            query_start_loc=starts,
            seq_lens=lengths,
            cu_seq_lens=cumulative,
            row_start=cumulative * 3 + 1,
            **outputs,
            token_origin=origin,
            dcp_rank=rank % dcp,
            dcp_world=dcp,
            interleave=interleave,
            num_requests=len(query_lens),
            compress_ratio=ratio,
            **more,
        )
        written.append(outputs)
    for name, expected in written[0].items():
        assert torch.equal(written[1][name], expected), name
    assert not (written[0]["key_end"] == POISON).any()
    assert not (written[0]["token_to_seq"] == POISON).any()


def test_arguments_that_would_change_type_are_refused():
    from vllm_dcp_mla.indexer.chunk_kernel import write_chunk_bounds

    empty = torch.zeros(2, dtype=torch.int32)
    tensors = dict.fromkeys(
        ("query_start_loc", "seq_lens", "cu_seq_lens", "row_start", "token_to_seq", "key_start"),
        empty,
    )
    with pytest.raises(ValueError, match="lower --max-num-batched-tokens"):
        write_chunk_bounds(
            **tensors,
            key_end=empty,
            token_origin=1 << 31,
            dcp_rank=0,
            dcp_world=1,
            interleave=1,
            num_requests=1,
            compress_ratio=1,
        )
