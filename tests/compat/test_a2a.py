"""vLLM's all-to-all with a rank that has no sequences, in the Triton interpreter."""

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("cpu_vllm")]

TOKENS, HEADS, DIM, RANKS = 3, 4, 16, 2


def pack(seq_lens, starts):
    """What a rank sends: the LSE that each of its rows arrives with, ``[RANKS, TOKENS, HEADS]``."""
    from vllm.v1.attention.ops import dcp

    from vllm_dcp_mla.compat import a2a

    a2a.install()
    a2a.install()
    out = torch.randn(TOKENS, HEADS, DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
    lse = torch.arange(TOKENS * HEADS, dtype=torch.float32).view(TOKENS, HEADS)
    send = torch.full((RANKS, TOKENS, HEADS // RANKS, DIM + 2), float("nan"), dtype=torch.bfloat16)
    dcp._dcp_a2a_pack_send(
        out, lse, send, RANKS, HEADS // RANKS, DIM, 2, seq_lens=seq_lens, query_start_loc=starts
    )
    assert torch.equal(send[0, :, :, :DIM], out[:, : HEADS // RANKS])
    packed = send[..., DIM:].contiguous().view(torch.int16).int() & 0xFFFF
    bits = packed[..., 0] + (packed[..., 1].long() << 16)
    arrived = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int().view(torch.float32)
    return arrived, lse.view(TOKENS, RANKS, -1).transpose(0, 1)


def test_rows_of_a_rank_without_sequences_are_empty():
    arrived, _ = pack(torch.zeros(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    assert torch.equal(arrived, torch.full_like(arrived, float("-inf")))


def test_without_lengths_nothing_is_masked():
    arrived, lse = pack(None, None)
    assert torch.equal(arrived, lse)


def test_sequences_are_masked_as_before():
    arrived, lse = pack(
        torch.tensor([5, 0], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)
    )
    assert torch.equal(arrived[:, 0], lse[:, 0])
    assert torch.isinf(arrived[:, 1:]).all()
