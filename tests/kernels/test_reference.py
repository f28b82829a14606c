from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from kernel_batches import NOPE, expected, make_batch, make_buffers  # noqa: E402

from vllm_dcp_mla.kernels import load_kernel  # noqa: E402

# Outputs are bf16: half a unit in the last place is 2^-9 of an element.
BF16 = {"rtol": 2**-8, "atol": 2e-3}


@settings(max_examples=40)
@given(
    st.integers(1, 9),
    st.sampled_from([1, 8, 13, 64, 128]),
    st.sampled_from([1, 31, 128]),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float8_e4m3fn]),
    st.integers(0, 2**31),
)
def test_agrees_with_float64(tokens, heads, topk, dtype, seed):
    batch = make_batch(tokens, heads, topk, dtype=dtype, seed=seed)
    load_kernel("reference").launch(batch, make_buffers(heads, tokens))
    out, lse = expected(batch)
    held = batch.counts > 0
    torch.testing.assert_close(batch.out[held].double(), out[held], **BF16)
    torch.testing.assert_close(batch.lse.double(), lse, rtol=1e-5, atol=1e-5)
    assert batch.out[~held].isnan().all(), "rows without tokens must be left unwritten"


def test_nope_rows():
    batch = make_batch(3, 8, 16, dims=NOPE, counts=[1, 16, 5])
    load_kernel("reference").launch(batch, make_buffers(8, 3))
    torch.testing.assert_close(batch.out.double(), expected(batch)[0], **BF16)


def test_without_lse_no_workspace_is_needed():
    batch = make_batch(4, 8, 16, counts=[4, 4, 4, 4], want_lse=False)
    buffers = replace(make_buffers(8, 4), workspace=torch.zeros(1, dtype=torch.int8))
    load_kernel("reference").launch(batch, buffers)
    assert not batch.out.isnan().any()


def test_slab_must_fit_to_the_byte():
    buffers = make_buffers(8, 4, scratch=0)
    if buffers.workspace.data_ptr() % 16 == 0:
        load_kernel("reference").launch(make_batch(4, 8, 16), buffers)
    short = replace(buffers, workspace=buffers.workspace[:-17])
    with pytest.raises(RuntimeError, match=r"4 tokens x 8 heads need \d+ bytes"):
        load_kernel("reference").launch(make_batch(4, 8, 16), short)


def test_only_the_statistics_are_written():
    buffers = make_buffers(8, 4)
    load_kernel("reference").launch(make_batch(4, 8, 16), buffers)
    assert not buffers.workspace[4 * 8 * 8 + 16 :].any()
    assert not buffers.counters.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: replace(b, query=b.query.half()), "needs one dtype for both"),
        (lambda b: replace(b, page_size=7), "pages of 7 rows"),
        (lambda b: replace(b, cache_rows=b.cache_rows[:-1]), "whole pages of 32"),
        (lambda b: replace(b, topk=b.topk.clamp_max(-1)), "entry is -1, outside the cache's 224"),
        (lambda b: replace(b, topk=b.topk + 224), "outside the cache's 224"),
        (lambda b: replace(b, dims=NOPE, counts=b.counts * 0), "at least 1 token"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        load_kernel("reference").launch(change(make_batch(4, 8, 16)), make_buffers(8, 4))


@pytest.mark.parametrize("heads", [65, 96, 127])
def test_head_counts_between_64_and_128_are_refused(heads):
    with pytest.raises(ValueError, match=f"65 to 127 query heads, got {heads}"):
        load_kernel("reference").launch(make_batch(1, heads, 4), make_buffers(heads, 1))


def test_small_counters_are_refused():
    buffers = replace(make_buffers(8, 4), counters=torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(ValueError, match="counter bytes"):
        load_kernel("reference").launch(make_batch(4, 8, 16), buffers)


def test_unknown_kernels_are_named():
    with pytest.raises(ValueError, match="'fast'; known: trtllm_gen, flashmla"):
        load_kernel("fast")
