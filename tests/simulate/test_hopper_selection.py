"""What vLLM picks on an H200 that is not there, stock beside this package, in two processes."""

import pytest
from asked import ask

from release_marks import serves_hopper

pytestmark = [pytest.mark.vllm, pytest.mark.slow, serves_hopper]

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


def question(model, tp, dcp, cache, backend=None):
    return {"model": model, "gpu": "h200", "tp": tp, "pcp": 1, "dcp": dcp,
            "kv_cache_dtype": cache, "backend": backend}  # fmt: skip


@pytest.fixture(scope="module")
def matrix():
    """Answers by model, sizes, cache: (stock's, ours)."""
    keys = [(m, s, c) for m in MODELS for s in SIZES for c in CACHES]
    questions = [question(m, *s, c) for m, s, c in keys]
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
    asked = question("glm-5.2", 2, 2, "bfloat16", "DCP_MLA_SPARSE")
    (auto,) = ask([asked])
    assert auto["cls"] == "vllm_dcp_mla.backends.hopper.DcpFlashAttnMLASparseBackend"
    (forced,) = ask([asked], VLLM_DCP_MLA_KERNEL="reference")
    assert forced["cls"] == "vllm_dcp_mla.backends.trtllm.DcpFlashInferMLASparseBackend"
