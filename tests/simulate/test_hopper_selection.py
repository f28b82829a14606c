"""What vLLM picks on an H200 that is not there, stock beside this package, in two processes."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

MODELS = ("glm-5.2", "deepseek-v3.2")
#: TP and DCP.
SIZES = ((2, 2), (4, 2), (4, 4), (8, 8))
CACHES = ("bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla")
#: (FlashMLA's class serves fp8_ds_mla) by model and sizes: what stock's constructors do.
FLASHMLA_SERVES = {
    ("glm-5.2", (4, 2)),
    ("glm-5.2", (4, 4)),
    ("glm-5.2", (8, 8)),
}

PROGRAM = """
import json, sys
from vllm_dcp_mla.models import load_config
from vllm_dcp_mla.simulate import selection
questions = json.load(sys.stdin)
for model, tp, dcp, cache, backend in questions:
    answer = selection._answer(selection.Question(
        load_config(model), "h200", tp, 1, dcp, cache, backend=backend))
    from vllm.v1.attention import selector
    selector._cached_get_attn_backend.cache_clear()
    print("ANSWER " + json.dumps(answer), flush=True)
"""


def ask(questions, **env):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        input=json.dumps(questions),
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "VLLM_LOGGING_LEVEL": "ERROR",
            **env,
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    answers = [
        json.loads(line.removeprefix("ANSWER "))
        for line in done.stdout.splitlines()
        if line.startswith("ANSWER ")
    ]
    assert len(answers) == len(questions), done.stderr[-3000:]
    return answers


@pytest.fixture(scope="module")
def matrix():
    """Answers by model, sizes, cache: (stock's, ours)."""
    keys = [(m, s, c) for m in MODELS for s in SIZES for c in CACHES]
    questions = [(m, *s, c, None) for m, s, c in keys]
    ours = ask(questions)
    stock = ask(questions, VLLM_DCP_MLA_DISABLE="1")
    return dict(zip(keys, zip(stock, ours, strict=True), strict=True))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("cache", CACHES)
def test_what_is_picked(matrix, model, sizes, cache):
    stock, ours = matrix[model, sizes, cache]
    flashmla = (model, sizes) in FLASHMLA_SERVES
    if cache in ("bfloat16", "fp8_e4m3") or (cache == "fp8" and not flashmla):
        picked = "FLASH_ATTN_MLA_SPARSE"
        cls = "vllm_dcp_mla.backends.hopper.DcpFlashAttnMLASparseBackend"
    elif flashmla:
        picked, cls = "FLASHMLA_SPARSE", "vllm_dcp_mla.backends.flashmla.DcpFlashMLASparseBackend"
    else:
        picked = cls = None
    assert (ours["picked"], ours["cls"]) == (picked, cls), ours["refused"]
    # Stock has nothing for fp8_e4m3, calls its class valid for all else and raises later.
    assert stock["picked"] == (None if cache == "fp8_e4m3" else "FLASHMLA_SPARSE")
    assert (stock["cls"] or "vllm.v1.").startswith("vllm.v1.")
    if picked is None:
        (reason,) = ours["refused"]["FLASHMLA_SPARSE"]
        assert "works here: --kv-cache-dtype fp8_e4m3 (served by FLASH_ATTN_MLA_SPARSE)" in reason
    if cache == "fp8" and flashmla:
        reason = " ".join(ours["refused"]["FLASH_ATTN_MLA_SPARSE"])
        assert "fp8 is fp8_ds_mla here" in reason
        assert "works here: FLASHMLA_SPARSE" in reason


def test_the_alias_is_this_gpus_class_or_the_forced_kernels():
    question = ("glm-5.2", 2, 2, "bfloat16", "DCP_MLA_SPARSE")
    (auto,) = ask([question])
    assert auto["cls"] == "vllm_dcp_mla.backends.hopper.DcpFlashAttnMLASparseBackend"
    (forced,) = ask([question], VLLM_DCP_MLA_KERNEL="reference")
    assert forced["cls"] == "vllm_dcp_mla.backends.trtllm.DcpFlashInferMLASparseBackend"
