"""Known failures in server logs: what is found, and that their texts are those that are written."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import vllm_dcp_mla
from vllm_dcp_mla.cli.main import main
from vllm_dcp_mla.doctor.server_log import SYMPTOMS, LogError, examine_log, read_log

#: A line of each failure, as it was reported or is written.
LINES = {
    "workspace overflow": "RuntimeError: Error in function 'aligned_alloc' at allocator.h:49: "
    "Buffer overflow when allocating memory for trtllm_gen_softmax_workspace with size 1611661312 "
    "and alignment 16, but only 404750336 bytes available in AlignedAllocator.",
    "negative KV budget": "ValueError: No available memory for the cache blocks. Try increasing "
    "`gpu_memory_utilization` when initializing the engine",
    "KV cache below one request": "ValueError: To serve at least one request with the model's max "
    "seq len (1048576), (46.58 GiB KV cache is needed, which is larger than the available KV cache "
    "memory (14.10 GiB). Based on",
    "autotuning out of memory": "(Worker_TP0 pid=7) WARNING [Autotuner]: OOM detected, falling "
    "back to default tactic",
    "late JIT compilation": "WARNING 09-18 [jit_monitor.py:140] Triton kernel JIT compilation "
    "during inference: BuildPrefillChunkMetadataKernel.kernel. This causes a latency spike",
    "refused by every backend": "ValueError: No valid attention backend found for cuda with "
    "AttentionSelectorConfig(head_size=576). Reasons: {FLASHMLA_SPARSE: [compute capability not "
    "supported], FLASHINFER_MLA_SPARSE: [DCP not supported], FLASHMLA: [sparse not supported]}.",
    "refused by the backend named": "ValueError: Selected backend FLASHMLA_SPARSE is not valid for "
    "this configuration. Reason: ['kv_cache_dtype not supported']",
    "refused in a constructor": "NotImplementedError: DCP for FlashMLA sparse requires an "
    "fp8_ds_mla kv-cache; the bf16 sparse path is not supported under DCP.",
    "a class without LSE under DCP": "AssertionError: Decode Context Parallelism (DCP) requires "
    "attention implementations to return the softmax LSE during decode, but X does not.",
    "a workspace that was locked too small": "AssertionError: Workspace is locked but allocation "
    "from 'x.py:3:f' requires 1949.52 MB, current size is 1157.00 MB.",
    "a rank that did not answer": "TimeoutError: RPC call to sample_tokens timed out.",
    "out of GPU memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 12.22 GiB. "
    "GPU 0 has a total capacity of 178.35 GiB of which 7.60 GiB is free. Process",
    "FlashInfer's two packages differ": "RuntimeError: flashinfer-cubin version (0.6.13) does not "
    "match flashinfer version (0.6.14). Please install the same version of both packages.",
    "this package is off": "WARNING vllm-dcp-mla is off: VLLM_DCP_MLA_DISABLE is set; vLLM is "
    "untouched.",
}
#: What a healthy start says, with words of the failures.
HEALTHY = [
    "INFO Starting to monitor kernel JIT compilation during inference",
    "INFO Available KV cache memory: 65.36 GiB",
    "INFO GPU KV cache size: 11,769,344 tokens, Maximum concurrency for 131,072 tokens per request",
    "INFO vllm-dcp-mla 0.1.0 serves sparse MLA under decode context parallelism: FLASHMLA_SPARSE.",
]


def test_every_failure_has_a_line():
    assert set(LINES) == {symptom.name for symptom in SYMPTOMS}


@pytest.mark.parametrize("name", LINES)
def test_a_failure_is_named_with_its_fix(name):
    report = examine_log([*HEALTHY, LINES[name] + "\n", *HEALTHY, LINES[name]])
    (check,) = report.checks
    assert check.name == name
    assert check.found.startswith(f"line {len(HEALTHY) + 1}, 2 times in all: ")
    assert check.fix
    assert report.ok == (check.status == "warn")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("workspace overflow", "trtllm_gen_softmax_workspace with size 1611661312"),
        ("workspace overflow", "only 404750336 bytes"),
        ("late JIT compilation", "BuildPrefillChunkMetadataKernel.kernel"),
        ("refused by every backend", "FLASHINFER_MLA_SPARSE: [DCP not supported]"),
        ("out of GPU memory", "12.22 GiB"),
        ("KV cache below one request", "46.58 GiB"),
    ],
)
def test_the_figures_of_a_failure_are_told(name, told):
    (check,) = examine_log([LINES[name]]).checks
    assert told in check.found


def test_dense_backends_are_not_told():
    (check,) = examine_log([LINES["refused by every backend"]]).checks
    assert "FLASHMLA: [" not in check.found


def test_a_healthy_log_has_none():
    (check,) = examine_log(HEALTHY).checks
    assert (check.status, check.found) == ("pass", "no known failure in 4 lines")


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "(EngineCore) ERROR 11-30 [core.py:1] Engine core initialization failed",
        "Traceback (most recent call last):",
    ],
)
def test_a_failure_that_is_not_known_is_told(line):
    (check,) = examine_log([*HEALTHY, line]).checks
    assert (check.status, check.found) == (
        "warn",
        f"no known failure in 5 lines, but line 5 says: {line}",
    )
    warned = f"WARNING 11-30 [x.py:1] falls back: {line}"
    assert examine_log([*HEALTHY, warned]).checks[0].status == "pass"
    known = examine_log([line, LINES["negative KV budget"]]).checks
    assert [c.name for c in known] == ["negative KV budget"]


def test_what_is_no_log_of_vllms_is_told():
    (check,) = examine_log(["\x1f\x8b\x08", "noise"]).checks
    assert (check.status, check.found) == (
        "warn",
        "no known failure in 2 lines, none of which names vLLM",
    )


def test_an_empty_log_is_no_proof():
    report = examine_log([])
    assert not report.ok


@given(st.lists(st.text(max_size=300)))
def test_any_log_has_an_answer(lines):
    assert examine_log(lines).checks


def test_a_log_that_is_not_there_is_one_sentence(tmp_path):
    for path in (tmp_path, tmp_path / "none", "nul\0byte"):
        with pytest.raises(LogError, match="cannot be read"):
            read_log(str(path))


def test_the_command_reads_a_binary_log(tmp_path, capsys):
    log = tmp_path / "server.log"
    log.write_bytes(b"\xff\xfe\x00" * 100 + b"\n" + LINES["negative KV budget"].encode())
    assert main(["doctor", "--log", str(log), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [c["name"] for c in report["checks"]] == ["negative KV budget"]
    assert main(["doctor", "--log", str(log)]) == 1
    assert "fix:" in capsys.readouterr().out
    assert main(["doctor", "--log", str(tmp_path / "none"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["ok"] is False


#: Where each text is written; torch's own is in its binary.
WRITERS = {
    "workspace overflow": "flashinfer/data/include/flashinfer/allocator.h",
    "negative KV budget": "vllm/v1/core/kv_cache_planning.py",
    "KV cache below one request": "vllm/v1/core/kv_cache_planning.py",
    "autotuning out of memory": "flashinfer/autotuner/autotuner.py",
    "late JIT compilation": "vllm/utils/jit_monitor.py",
    "refused by every backend": "vllm/platforms/cuda.py",
    "refused in a constructor": "vllm/v1/attention/backends/mla/flashmla_sparse.py",
    "a class without LSE under DCP": "vllm/v1/worker/cp_utils.py",
    "a workspace that was locked too small": "vllm/v1/worker/workspace.py",
    "a rank that did not answer": "vllm/v1/executor/multiproc_executor.py",
    "FlashInfer's two packages differ": "flashinfer/jit/env.py",
    "this package is off": "vllm_dcp_mla/plugin.py",
}


def test_all_but_two_writers_are_known():
    """Split over two literals in the source, and written by torch's allocator in C++."""
    unknown = {"refused by the backend named", "out of GPU memory"}
    assert {symptom.name for symptom in SYMPTOMS} - set(WRITERS) == unknown


def test_out_of_memory_is_known_by_its_first_words():
    line = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 12.20 GiB"
    (check,) = examine_log([line]).checks
    assert (check.name, check.status) == ("out of GPU memory", "fail")
    assert "lower --gpu-memory-utilization" in check.fix


@pytest.mark.vllm
@pytest.mark.parametrize("name", WRITERS)
def test_a_text_is_what_is_written(name):
    (symptom,) = (s for s in SYMPTOMS if s.name == name)
    folder, _, rest = WRITERS[name].partition("/")
    if folder == "vllm_dcp_mla":
        root = Path(vllm_dcp_mla.__file__).parent
    else:
        root = Path(find_spec(folder).origin).parent
    assert symptom.text in (root / rest).read_text()
