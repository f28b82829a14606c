from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from kernel_batches import NOPE, expected, make_batch, make_buffers  # noqa: E402

from vllm_dcp_mla.kernels import load_kernel  # noqa: E402
from vllm_dcp_mla.kernels.split import clear_empty_rows, launch_split  # noqa: E402
from vllm_dcp_mla.workspace import WorkspacePlan  # noqa: E402


def plan(heads, tokens_per_launch):
    return WorkspacePlan(heads, tokens_per_launch, 0, 0)


class Spy:
    """The reference, noting the rows of each launch."""

    name, lse_base = "spy", "2"

    def __init__(self):
        self.launches = []
        self.kernel = load_kernel("reference")

    def launch(self, batch, buffers):
        self.launches.append(batch.query.shape[0])
        self.kernel.launch(batch, buffers)


@settings(max_examples=30)
@given(st.integers(1, 12), st.integers(1, 13), st.integers(0, 2**31))
def test_splitting_changes_no_bit(tokens, per_launch, seed):
    whole, parts = (make_batch(tokens, 8, 24, seed=seed) for _ in range(2))
    launch_split(Spy(), whole, make_buffers(8, tokens), plan(8, tokens))
    spy = Spy()
    # The workspace holds one launch of per_launch tokens and not a byte of slab more.
    launch_split(spy, parts, make_buffers(8, per_launch, scratch=16), plan(8, per_launch))
    assert torch.equal(whole.out, parts.out)
    assert torch.equal(whole.lse, parts.lse)
    assert max(spy.launches) <= per_launch
    assert sum(spy.launches) == tokens


def test_no_tokens_no_launch():
    spy = Spy()
    launch_split(spy, make_batch(0, 8, 4), make_buffers(8, 1), plan(8, 4))
    assert spy.launches == []


@pytest.mark.parametrize("dims", [None, NOPE])
def test_empty_rows_leave_as_the_identity_of_the_merge(dims):
    batch = make_batch(4, 8, 16, counts=[0, 3, 0, 16], **({"dims": dims} if dims else {}))
    launch_split(Spy(), batch, make_buffers(8, 3), plan(8, 3))
    out, lse = expected(batch)
    torch.testing.assert_close(batch.out.double(), out, rtol=2**-8, atol=2e-3)
    torch.testing.assert_close(batch.lse.double(), lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("left", [float("nan"), float("inf"), 0.0])
def test_whatever_a_kernel_leaves_in_empty_rows_is_cleared(left):
    out, lse = torch.full((3, 2, 4), left), torch.full((3, 2), left)
    clear_empty_rows(out, lse, torch.tensor([0, 1, 0], dtype=torch.int32))
    assert torch.equal(out[[0, 2]], torch.zeros(2, 2, 4))
    assert torch.equal(lse[[0, 2]], torch.full((2, 2), float("-inf")))
    assert torch.equal(out[1], torch.full((2, 4), left)) or left != left


def test_results_land_in_the_callers_memory():
    batch = make_batch(5, 8, 8)
    strided = torch.full((5, 8, 1024), float("nan"), dtype=torch.bfloat16)
    view = replace(batch, out=strided[:, :, :512])
    launch_split(Spy(), view, make_buffers(8, 2), plan(8, 2))
    assert not strided[:, :, :512].isnan().any()
    assert strided[:, :, 512:].isnan().all()
