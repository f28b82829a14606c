"""The drafter's graphs under PCP: what stock captures, and which engines the patch is for."""

import inspect
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from release_marks import gathers_here  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("cpu_vllm"), gathers_here]


class Manager:
    """Stock's manager of graphs, as far as it is made here."""

    def __init__(self, vllm_config, device, cudagraph_mode, decode_query_len):
        self.made_of = (vllm_config, device)
        self.cudagraph_mode = cudagraph_mode
        self.decode_query_len = decode_query_len


@pytest.fixture
def drafters(monkeypatch):
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator

    from vllm_dcp_mla.compat import pcp_drafts

    kind = speculator.TargetDependentARSpeculator
    monkeypatch.setattr(kind, "init_cudagraph_manager", kind.init_cudagraph_manager)
    monkeypatch.setattr(speculator, "SpeculatorCudaGraphManager", Manager)
    pcp_drafts.install()
    return kind


def managers(drafters, pcp, dcp, mode):
    from vllm.config import CUDAGraphMode

    drafter = SimpleNamespace()
    drafter.num_speculative_steps = 2
    drafter.device = "a device"
    drafter.vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            prefill_context_parallel_size=pcp, decode_context_parallel_size=dcp
        )
    )
    drafters.init_cudagraph_manager(drafter, CUDAGraphMode[mode])
    made = (drafter.prefill_cudagraph_manager, drafter.decode_cudagraph_manager)
    for manager, tokens in zip(made, (3, 1), strict=True):
        assert manager.made_of == (drafter.vllm_config, drafter.device)
        assert manager.decode_query_len == tokens
    return tuple(manager.cudagraph_mode.name for manager in made)


@pytest.mark.parametrize(
    ("mode", "later"), [("PIECEWISE", "NONE"), ("FULL_DECODE_ONLY", "FULL_DECODE_ONLY")]
)
@pytest.mark.parametrize("sizes", [(2, 2), (2, 4), (4, 4)])
def test_with_pcp_and_dcp_the_first_pass_has_no_graphs(drafters, sizes, mode, later):
    assert managers(drafters, *sizes, mode) == ("NONE", later)


@pytest.mark.parametrize(
    ("mode", "later"), [("PIECEWISE", "NONE"), ("FULL_DECODE_ONLY", "FULL_DECODE_ONLY")]
)
@pytest.mark.parametrize("sizes", [(1, 1), (1, 4), (2, 1)])
def test_other_engines_keep_stocks(drafters, sizes, mode, later):
    assert managers(drafters, *sizes, mode) == (mode, later)


def test_installing_again_changes_nothing(drafters):
    from vllm_dcp_mla.compat import pcp_drafts

    before = drafters.init_cudagraph_manager
    pcp_drafts.install()
    assert drafters.init_cudagraph_manager is before


def test_stock_captures_drafters_without_the_pcp_manager():
    """The cause; once it is gone, so can the patch."""
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import (
        SpeculatorCudaGraphManager,
    )

    assert "pcp_manager" in inspect.signature(ModelCudaGraphManager.capture).parameters
    assert "pcp_manager" not in inspect.signature(SpeculatorCudaGraphManager.capture).parameters


def test_a_prefill_with_the_slots_of_one_rank_caches_no_key():
    """The symptom's first half: the kernel that caches keys is launched for none of them."""
    from vllm.v1.attention.ops.pcp import maybe_gather_indexer_k

    keys, slots = torch.ones(32, 128), torch.full((32,), -1)
    kept, kept_slots = maybe_gather_indexer_k(keys, slots, num_decode_tokens=0, use_pcp=True)
    assert (kept.shape, kept_slots.shape) == ((0, 128), (0,))
