import math

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from vllm_dcp_mla import combine_partials  # noqa: E402

NAN, INF = float("nan"), float("inf")


def combine(outs, lses, base="e"):
    out, lse = combine_partials(
        torch.tensor(outs).view(-1, 1, 1, 1), torch.tensor(lses).view(-1, 1, 1), base
    )
    return out.item(), lse.item()


def test_two_shards():
    assert combine([0.0, 1.0], [0.0, math.log(3)])[0] == pytest.approx(0.75)
    assert combine([0.0, 1.0], [0.0, math.log2(3)], "2")[0] == pytest.approx(0.75)
    # What a merge in the wrong base makes of the same shards.
    assert combine([0.0, 1.0], [0.0, math.log2(3)], "e")[0] == pytest.approx(0.8299, abs=1e-4)


@pytest.mark.parametrize("empty", [-INF, INF, NAN])
def test_an_empty_rank_does_not_count(empty):
    out, lse = combine([1.0, NAN, 5.0], [0.0, empty, math.log(3)])
    assert out == pytest.approx(4.0)
    assert lse == pytest.approx(math.log(4))


@pytest.mark.parametrize("empty", [-INF, INF, NAN])
@pytest.mark.parametrize("base", ["e", "2"])
def test_all_ranks_empty(empty, base):
    assert combine([NAN, NAN], [empty, empty], base) == (0.0, -INF)


@given(st.integers(1, 8), st.sampled_from(["e", "2"]), st.integers(0, 2**31))
def test_shards_merge_into_attention_over_all_keys(ranks, base, seed):
    draw = torch.Generator().manual_seed(seed)
    tokens, heads, dim, keys = 3, 2, 5, 11
    scores = 20 * torch.randn(tokens, heads, keys, generator=draw, dtype=torch.float64)
    values = torch.randn(keys, dim, generator=draw, dtype=torch.float64)
    owner = torch.randint(ranks, (keys,), generator=draw)
    unit = 1.0 if base == "e" else math.log(2)
    outs, lses = [], []
    for rank in range(ranks):
        mine = scores[..., owner == rank]
        lses.append(torch.logsumexp(mine, -1) / unit)
        outs.append(torch.softmax(mine, -1) @ values[owner == rank])
    out, lse = combine_partials(torch.stack(outs), torch.stack(lses), base)
    torch.testing.assert_close(out, torch.softmax(scores, -1) @ values)
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1) / unit)


def test_large_lse_does_not_overflow():
    assert combine([1.0, 3.0], [3000.0, 3000.0])[0] == pytest.approx(2.0)


def test_refusals():
    with pytest.raises(ValueError, match="base must be"):
        combine_partials(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1), "10")
    with pytest.raises(ValueError, match=r"\[R, T, H\]"):
        combine_partials(torch.ones(2, 1, 1, 1), torch.ones(1, 1, 1), "e")
