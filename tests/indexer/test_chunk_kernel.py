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


# Requests of 7, 5 and 9 query tokens from token 20 on, with 30, 5 and 1,500 keys, on the device.
@pytest.mark.parametrize("origin", [20, 24, 17, 50])
@pytest.mark.parametrize(("rows", "keys"), [(21, 1535), (25, 1600), (10, 1100), (3, 33), (1, 1)])
def test_nothing_is_written_outside_what_the_host_allocated(origin, rows, keys):
    """Where its lengths are others than the device's: adaptive verification knows upper bounds."""
    from vllm_dcp_mla.indexer.chunk_kernel import reference_chunk_bounds, write_chunk_bounds

    lengths, queries, around = [30, 5, 1500], [7, 5, 9], 2048
    row_start = [0, 100, 200]
    wanted_start, wanted_end = [POISON] * rows, [POISON] * rows
    token = 20 - origin
    for length, query_len, start in zip(lengths, queries, row_start, strict=True):
        for visible in range(length - query_len + 1, length + 1):
            if 0 <= token < rows:
                wanted_start[token], wanted_end[token] = start, start + visible
            token += 1
    to_seq = [request for request, length in enumerate(lengths) for _ in range(length)]
    wanted_to_seq = (to_seq + [POISON] * keys)[:keys]
    for write_bounds in (reference_chunk_bounds, write_chunk_bounds):
        memory = torch.full((3, around + 2048 + around), POISON, dtype=torch.int32)
        write_bounds(
            query_start_loc=torch.tensor([20, 27, 32, 41], dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            cu_seq_lens=torch.tensor([0, 30, 35, 1535], dtype=torch.int32),
            row_start=torch.tensor(row_start, dtype=torch.int32),
            key_start=memory[0, around : around + rows],
            key_end=memory[1, around : around + rows],
            token_to_seq=memory[2, around : around + keys],
            token_origin=origin,
            dcp_rank=0,
            dcp_world=1,
            interleave=1,
            num_requests=3,
            compress_ratio=1,
        )
        for found, wanted in zip(memory, (wanted_start, wanted_end, wanted_to_seq), strict=True):
            assert found[around : around + len(wanted)].tolist() == wanted
            assert (found[:around] == POISON).all()
            assert (found[around + len(wanted) :] == POISON).all()


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
