"""The Triton kernel, interpreted, against its plain torch reference."""

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from vllm_dcp_mla.indexer.lengths import local_lengths  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("cpu_vllm")]
POISON = -77


@settings(max_examples=40)
@given(
    rows=st.integers(0, 3),
    columns=st.integers(1, 1100),
    most=st.sampled_from([3, 700, 1 << 20]),
    dcp=st.sampled_from([1, 2, 4, 8]),
    rank=st.integers(0, 7),
    interleave=st.sampled_from([1, 3, 64]),
    in_place=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_agrees_with_the_reference(rows, columns, most, dcp, rank, interleave, in_place, seed):
    from vllm_dcp_mla.indexer.length_kernel import write_local_lengths

    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(most + 1, (rows, columns), generator=draw, dtype=torch.int32)
    where = {"rank": rank % dcp, "dcp": dcp, "interleave": interleave}
    wanted = local_lengths(lengths, *where.values())
    memory = torch.full((rows * columns + 5,), POISON, dtype=torch.int32)
    local = memory[:-5].view(rows, columns)
    if in_place:
        local.copy_(lengths)
        lengths = local
    write_local_lengths(lengths, local, **where)
    assert torch.equal(local, wanted)
    assert (memory[-5:] == POISON).all()
