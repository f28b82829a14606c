import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
from vllm_dcp_mla.bench import check, inputs  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(params=sorted(inputs.CACHES))
def batch(request):
    torch.manual_seed(3)
    cache = inputs.make_cache(request.param, CPU, rows=1 << 10)
    (made,) = inputs.make_sets(cache, tokens=5, heads=3, rows=40, sets=1, width=64)
    return inputs.with_ragged_rows(made)


def solve(batch):
    """The right answer, rounded as a kernel rounds it."""
    out, lse = check.attend_float64(batch, torch.arange(len(batch.query)))
    batch.out.copy_(out)
    batch.lse.copy_(lse)


def test_every_other_row_is_a_trap_and_outputs_are_unwritten(batch):
    assert torch.isnan(batch.cache_rows[1::2].float()).all()
    assert torch.isfinite(batch.cache_rows[::2].float()).all()
    chosen = batch.topk[batch.topk >= 0]
    assert not (chosen % 2).any()
    assert torch.isnan(batch.out).all()
    assert torch.isnan(batch.lse).all()
    assert batch.counts[2] == 0
    assert ((batch.topk >= 0).sum(1) == batch.counts).all()


def test_float64_is_the_softmax_over_the_keys(batch):
    out, lse = check.attend_float64(batch, torch.tensor([0, 2]))
    keys = batch.cache_rows[batch.topk[0, : batch.counts[0]].long()].double() * batch.cache_scale
    weights = torch.exp(batch.query[0].double() @ keys.T * batch.softmax_scale)
    torch.testing.assert_close(out[0], weights @ keys[:, :512] / weights.sum(1, keepdim=True))
    torch.testing.assert_close(lse[0], weights.sum(1).log())
    assert not out[1].any()
    assert (lse[1] == -math.inf).all()


def test_a_right_result_passes_in_either_base(batch):
    solve(batch)
    assert check.problem_with(batch, "e") is None
    batch.lse.div_(math.log(2.0))
    assert check.problem_with(batch, "2") is None
    assert "its LSE is off" in check.problem_with(batch, "e")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda b: b.out[4, 2, 511].fill_(math.nan), "left unwritten"),
        (lambda b: b.lse[4, 2].fill_(math.nan), "left unwritten"),
        (lambda b: b.out[4].mul_(1.05), "relative error is 0.0"),
        (lambda b: b.out[2, 1].fill_(1), "relative error"),
        (lambda b: b.lse[2, 1].fill_(math.inf), "row without keys"),
        (lambda b: b.lse[0].add_(0.05), "LSE is off by 0.05"),
    ],
)
def test_a_wrong_result_is_said(batch, spoil, said):
    solve(batch)
    spoil(batch)
    assert said in check.problem_with(batch, "e")


def test_poisoned_outputs_do_not_pass(batch):
    solve(batch)
    check.poison(batch)
    assert check.problem_with(batch, "e") is not None


def test_many_tokens_are_sampled_with_both_ends_and_the_empty_one():
    tokens = check.sampled_tokens(8192, CPU).tolist()
    assert tokens[0] == 0
    assert tokens[-1] == 8191
    assert 4096 in tokens
    assert len(tokens) <= 9
    assert check.sampled_tokens(1, CPU).tolist() == [0]


def test_sets_share_the_cache_and_nothing_else():
    cache = inputs.make_cache("bf16", CPU, rows=1 << 10)
    one, two = inputs.make_sets(cache, tokens=2, heads=3, rows=40, sets=2, width=64)
    assert one.cache_rows is two.cache_rows
    for name in ("query", "topk", "out", "lse"):
        assert getattr(one, name).data_ptr() != getattr(two, name).data_ptr()
    assert not torch.equal(one.topk, two.topk)
    assert (one.counts == 40).all()
    assert (one.topk[:, 40:] == -1).all()
    assert inputs.set_bytes(replace(one), 40) == 2 * (3 * (576 + 512) * 2 + 40 * 1152)
