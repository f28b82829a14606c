"""The call into FlashInfer: its function is replaced, since the kernel runs on SM100 only."""

import sys
from types import ModuleType

import pytest

from release_marks import RELEASE

torch = pytest.importorskip("torch")
from kernel_batches import NOPE, make_batch, make_buffers  # noqa: E402

from vllm_dcp_mla.kernels import load_kernel  # noqa: E402

OLD_ARGUMENTS = """query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank,
qk_rope_head_dim, block_tables, seq_lens, max_seq_len, sparse_mla_top_k=0, out=None, bmm1_scale=1.0,
bmm2_scale=1.0, backend="auto", lse=None, return_lse=False"""
NEW_ARGUMENTS = (
    OLD_ARGUMENTS
    + ", multi_ctas_kv_counter_buffer=None, sparse_mla_top_k_lens=None, return_lse_base=None"
)


@pytest.fixture
def install(monkeypatch):
    def with_arguments(arguments):
        calls = []
        scope = {"calls": calls}
        exec(
            f"def trtllm_batch_decode_with_kv_cache_mla({arguments}):\n    calls.append(locals())",
            scope,
        )
        module = ModuleType("flashinfer.decode")
        module.trtllm_batch_decode_with_kv_cache_mla = scope[
            "trtllm_batch_decode_with_kv_cache_mla"
        ]
        monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
        monkeypatch.setitem(sys.modules, "flashinfer.decode", module)
        return load_kernel("trtllm_gen"), calls

    return with_arguments


def test_everything_is_pinned_and_passed_in(install):
    kernel, calls = install(NEW_ARGUMENTS)
    batch, buffers = make_batch(3, 8, 16, dtype=torch.float8_e4m3fn), make_buffers(8, 3)
    kernel.launch(batch, buffers)
    (call,) = calls
    assert call["backend"] == "trtllm-gen"
    assert call["return_lse"] is True
    assert call["return_lse_base"] == "base2"
    assert call["multi_ctas_kv_counter_buffer"] is buffers.counters
    assert call["workspace_buffer"] is buffers.workspace
    assert call["bmm1_scale"] == pytest.approx(batch.softmax_scale * 0.7 * 1.3)
    assert call["bmm2_scale"] == pytest.approx(1.3)
    assert call["max_seq_len"] == call["sparse_mla_top_k"] == 16
    assert call["query"].shape == (3, 1, 8, 576)
    assert call["kv_cache"].shape == (7, 1, 32, 576)
    assert call["block_tables"].shape == (3, 1, 16)
    assert call["out"].shape == (3, 1, 8, 512)
    assert call["out"].data_ptr() == batch.out.data_ptr()
    assert call["lse"].data_ptr() == batch.lse.data_ptr()
    assert call["sparse_mla_top_k_lens"] is None


def test_nope_rows_bring_their_lengths(install):
    kernel, calls = install(NEW_ARGUMENTS)
    batch = make_batch(2, 8, 16, dims=NOPE, counts=[1, 2])
    kernel.launch(batch, make_buffers(8, 2))
    assert calls[0]["sparse_mla_top_k_lens"] is batch.counts


def test_without_lse_none_is_asked_for(install):
    kernel, calls = install(NEW_ARGUMENTS)
    kernel.launch(make_batch(2, 8, 16, want_lse=False), make_buffers(8, 2))
    assert calls[0]["return_lse"] is False
    assert calls[0]["lse"] is None


def test_an_older_signature_gets_only_what_it_knows(install):
    kernel, calls = install(OLD_ARGUMENTS)
    kernel.launch(make_batch(2, 8, 16), make_buffers(8, 2))
    assert "return_lse_base" not in calls[0]


def test_a_signature_without_lse_is_named(install):
    with pytest.raises(ImportError, match="lacks lse"):
        install(OLD_ARGUMENTS.replace("lse=None, ", ""))


@pytest.mark.vllm
def test_the_installed_flashinfer_has_every_argument():
    kernel = load_kernel("trtllm_gen")
    assert kernel._takes_counters
    # What the releases before vLLM 0.33 pin has no such argument; the LSE is base 2 without it too.
    assert kernel._takes_lse_base is (RELEASE.minor >= 33)
