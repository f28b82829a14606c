"""FlashMLA's launches around a plain torch stand-in for its kernel; tests/gpu has the real one."""

import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from kernel_batches import make_batch, make_partials  # noqa: E402
from kernel_checks import agrees_with_float64, check  # noqa: E402

from release_marks import serves_hopper  # noqa: E402
from vllm_dcp_mla.key_splits import partial_bytes  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("cpu_vllm", "flashmla"), serves_hopper]
LAUNCHED: list[tuple[int, int]] = []


def forward(query, cache, indices, scale, *, d_v, topk_length, out):
    """As FlashMLA: whole blocks of 128 keys, an output without gaps, +inf for no keys."""
    tokens, heads, _ = query.shape
    assert indices.shape[-1] % 128 == 0
    assert out.is_contiguous()
    assert query.is_contiguous()
    # Blocks write their outputs while others still read their queries.
    begin, end = out.data_ptr(), out.data_ptr() + out.nbytes
    assert query.data_ptr() >= end or query.data_ptr() + query.nbytes <= begin
    LAUNCHED.append((tokens, indices.shape[-1]))
    found = torch.full((tokens, heads), math.inf)
    for token, count in enumerate(topk_length.tolist()):
        if not count:
            out[token] = math.nan
            continue
        keys = cache[indices[token, 0, :count].long(), 0].double()
        scores = query[token].double() @ keys.T * scale
        found[token] = torch.logsumexp(scores, -1)
        out[token] = (torch.softmax(scores, -1) @ keys[:, :d_v]).bfloat16()
    return out, None, found


@pytest.fixture
def flashmla(monkeypatch):
    from vllm.v1.attention.ops import flashmla as ops

    LAUNCHED.clear()
    monkeypatch.setattr(ops, "is_flashmla_sparse_supported", lambda: (True, None))
    name = "vllm.third_party.flashmla.flash_mla_interface"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(flash_mla_sparse_fwd=forward))


def kernel(num_sms=16, **more):
    from vllm_dcp_mla.kernels.flashmla import FlashMlaKernel

    return FlashMlaKernel(num_sms, **more)


@settings(max_examples=20)
@given(
    st.integers(1, 4),
    st.sampled_from([8, 16, 64]),
    st.sampled_from([128, 384, 640]),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_agrees_with_float64_in_any_number_of_parts(tokens, heads, topk, parts, want_lse, seed):
    made = kernel(parts=parts)
    agrees_with_float64(made, tokens, heads, topk, num_sms=16, seed=seed, want_lse=want_lse)


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 256, 257, 300, 383, 384])
def test_rows_of_any_length_and_outputs_apart(count):
    """Up to a block a part, rows that end in it, and rows too short for the last parts."""
    batch = make_batch(2, 16, 384, counts=[count, 384 - count])
    wide = torch.full((2, 19, 512), math.nan).bfloat16()
    queries = torch.full((2, 17, 576), math.nan).bfloat16()
    queries[:, :16] = batch.query
    batch = replace(batch, out=wide[:, :16], query=queries[:, :16])
    kernel(parts=3).launch(batch, make_partials(16))
    check(kernel(), batch)
    assert wide[:, 16:].isnan().all()


@pytest.mark.parametrize(
    ("tokens", "topk", "rows", "launched"),
    [
        *((1, 2048, None, (16, 128)), (2, 2048, None, (16, 256)), (8, 2048, None, (16, 1024))),
        (9, 2048, None, (9, 2048)),
        # Half of the tokens have more keys than a rank's share: room for a step more.
        *((1, 2048, 512, (5, 512)), (4, 2048, 512, (16, 512)), (1, 2048, 128, (1, 2048))),
        (1, 256, None, (1, 256)),
    ],
)
def test_small_batches_are_spread_over_the_gpu(tokens, topk, rows, launched):
    batch = make_batch(tokens, 8, topk, seed=tokens)
    kernel(rows=rows).launch(batch, make_partials(16))
    check(kernel(), batch)
    assert [launched] == LAUNCHED


def test_each_part_has_its_share_of_the_keys_and_no_row_behind_them():
    from vllm_dcp_mla.kernels.spread import spread

    batch = make_batch(3, 16, 640, counts=[0, 130, 640])
    batch.topk[0] = 5  # what vLLM left there is not to be read
    cut = spread(batch, 3, make_partials(16))
    assert cut.counts.tolist() == [0, 0, 0, 128, 2, 0, 256, 256, 128]
    for part, count in enumerate(cut.counts.tolist()):
        token, begin = part // 3, sum(cut.counts[part // 3 * 3 : part])
        assert torch.equal(cut.topk[part, :count], batch.topk[token, begin : begin + count])
        assert (cut.topk[part, count:] == -1).all()
        if count:
            assert torch.equal(cut.query[part], batch.query[token])


def test_what_is_no_number_is_not_hidden():
    batch = make_batch(2, 8, 384, counts=[384, 0])
    batch.query[0, 3, 7] = math.nan
    kernel(parts=3).launch(batch, make_partials(16))
    assert batch.out[0, 3].isnan().all()
    assert batch.lse[0, 3].isnan()
    assert not batch.out[1].any()


def test_memory_that_is_not_aligned_is_refused():
    batch = make_batch(2, 8, 384)
    memory = torch.zeros(batch.query.numel() + 1, dtype=torch.bfloat16)
    crooked = replace(batch, query=memory[1:].view_as(batch.query))
    with pytest.raises(ValueError, match="query lies at"):
        kernel(parts=3).launch(crooked, make_partials(16))


def test_the_parts_lie_in_the_workspace_and_nowhere_else():
    batch = make_batch(4, 64, 640, seed=3)
    buffers = make_partials(16)
    memory = torch.full((partial_bytes(512, 16) + 64,), 7, dtype=torch.int8)
    buffers = replace(buffers, workspace=memory[:-64])
    kernel(parts=4).launch(batch, buffers)
    check(kernel(), batch)
    assert (memory[-64:] == 7).all()
