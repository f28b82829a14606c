"""Widening of fp8 blocks and the rows of the copy, against plain torch."""

import math

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from kernel_batches import ROPE  # noqa: E402

from release_marks import serves_hopper  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("cpu_vllm"), serves_hopper]
FP8 = torch.float8_e4m3fn
BLOCK = 32


def make_blocks(number, seed, gap=0, block_size=BLOCK):
    """Random blocks; ``gap`` rows of NaN lie between them."""
    draw = torch.Generator().manual_seed(seed)
    wide = torch.full((number, block_size + gap, 576), math.nan).to(FP8)
    wide[:, :block_size] = (8 * torch.randn(number, block_size, 576, generator=draw)).to(FP8)
    return wide[:, :block_size]


def places(lengths):
    """The request of each copied block, and the first block of each request."""
    ends = torch.tensor(lengths).cumsum(0)
    owners = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return owners.int(), (ends - torch.tensor(lengths)).int()


def widened(blocks, table, lengths, scale=1.0, spare=1):
    """The copy, and where blocks are said to be; NaN and -7 where nothing was written."""
    from vllm_dcp_mla.kernels.widen import widen

    rows = (sum(lengths) + spare) * blocks.shape[1]
    wide = torch.full((rows, 576), math.nan, dtype=torch.bfloat16)
    moved = torch.full((len(blocks),), -7, dtype=torch.int32)
    widen(blocks, table, *places(lengths), scale, ROPE, wide=wide, moved=moved)
    return wide, moved


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.sampled_from([0, 1, 64]),
    st.sampled_from([16, 32, 48]),
    st.sampled_from([1.0, 0.25, 0.3]),
    st.integers(0, 2**31),
)
def test_blocks_of_requests_lie_one_after_the_other(lengths, gap, block_size, scale, seed):
    lengths = [*lengths, 1]
    number = sum(lengths) + 3
    blocks = make_blocks(number, seed, gap, block_size)
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(number, generator=draw).int()
    table = torch.full((len(lengths), 6), number + 99, dtype=torch.int32)  # no block: never read
    wanted, used = [], 0
    for request, length in enumerate(lengths):
        table[request, :length] = order[used : used + length]
        wanted += order[used : used + length].tolist()
        used += length
    wide, moved = widened(blocks, table, lengths, scale)
    values = (blocks[wanted].float() * scale).bfloat16()
    # Interpreted, Triton cuts bf16 off where a GPU rounds to the nearest.
    within = {"rtol": 0, "atol": 0} if scale != 0.3 else {"rtol": 2**-7, "atol": 0}
    torch.testing.assert_close(wide[: len(wanted) * block_size], values.view(-1, 576), **within)
    assert wide[len(wanted) * block_size :].isnan().all(), "nothing is written behind the last"
    assert moved[wanted].tolist() == list(range(len(wanted)))
    assert (moved[order[used:].long()] == -7).all()


def test_fp8_values_are_bf16_values():
    every = torch.arange(256, dtype=torch.uint8).view(FP8)
    every = every[~every.float().isnan()]  # which Triton, interpreted, takes for 480
    blocks = every.repeat(1, BLOCK, 3)[..., :576].contiguous()
    wide, _ = widened(blocks, torch.zeros(1, 1, dtype=torch.int32), [1])
    assert torch.equal(wide[:BLOCK].float(), blocks[0].float())


def test_a_block_that_requests_share_is_in_both_copies():
    blocks = make_blocks(4, 1)
    table = torch.tensor([[2, 0], [2, 1]], dtype=torch.int32)
    wide, moved = widened(blocks, table, [2, 2])
    assert torch.equal(wide[: 4 * BLOCK], blocks[[2, 0, 2, 1]].bfloat16().view(-1, 576))
    assert moved[2] in (0, 2)
    assert (moved[0], moved[1], moved[3]) == (1, 3, -7)


def test_a_cache_that_is_not_aligned_is_refused():
    memory = torch.zeros(2 * BLOCK * 576 + 8, dtype=torch.uint8).view(FP8)
    crooked = memory[8:].view(2, BLOCK, 576)
    with pytest.raises(ValueError, match=r"the cache lies at 0x\w+ with a stride of 18432"):
        widened(crooked, torch.zeros(1, 1, dtype=torch.int32), [1])


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 1500), min_size=1, max_size=5),
    st.integers(0, 70),
    st.integers(0, 2**31),
)
def test_rows_of_the_cache_become_rows_of_the_copy(counts, gap, seed):
    from vllm_dcp_mla.kernels.widen import remap

    draw = torch.Generator().manual_seed(seed)
    block_rows, number = BLOCK + gap, 50
    moved = torch.randperm(number, generator=draw).int()
    block = torch.randint(number, (len(counts), 1500), generator=draw)
    inside = torch.randint(BLOCK, block.shape, generator=draw)
    topk = (block * block_rows + inside).int()
    for token, count in enumerate(counts):
        topk[token, count:] = -1
    whole = torch.full((len(counts), 1600), -5, dtype=torch.int32)
    whole[:, :1500] = topk
    remap(
        *(whole[:, :1500], torch.tensor(counts, dtype=torch.int32), moved),
        block_rows=block_rows,
        block_size=BLOCK,
    )
    wanted = moved[block].long() * BLOCK + inside
    for token, count in enumerate(counts):
        assert torch.equal(whole[token, :count].long(), wanted[token, :count])
        assert (whole[token, count:1500] == -1).all()
    assert (whole[:, 1500:] == -5).all()
