"""What vLLM picks for PCP with DCP on GPUs that are not there, stock beside this package."""

import pytest
from asked import ask

from release_marks import gathers_here

pytestmark = [pytest.mark.vllm, pytest.mark.slow, gathers_here]

CACHES = ("auto", "fp8_e4m3", "bfloat16", "fp8_ds_mla")
#: TP, PCP and DCP.
SIZES = ((1, 4, 4), (2, 2, 2), (2, 2, 4))
CLASSES = {
    "b200": "vllm_dcp_mla.backends.trtllm.DcpF",
    "h200": "vllm_dcp_mla.backends.hopper.DcpFlashAttnMLASparseBackend",
}


def question(gpu, sizes, cache, comm="ag_rs"):
    tp, pcp, dcp = sizes
    return {"model": "glm-5.2", "gpu": gpu, "tp": tp, "pcp": pcp, "dcp": dcp,
            "kv_cache_dtype": cache, "comm": comm}  # fmt: skip


KEYS = [(sizes, cache) for sizes in SIZES for cache in CACHES]


@pytest.fixture(scope="module", params=CLASSES)
def asked(request):
    """A GPU; stock's and our answers to KEYS; ours to the exchange that the model asks for."""
    gpu = request.param
    questions = [question(gpu, *key) for key in KEYS]
    stock = ask(questions, VLLM_DCP_MLA_DISABLE="1")
    *ours, default = ask([*questions, question(gpu, (1, 4, 4), "fp8_e4m3", comm=None)])
    return gpu, stock, ours, default


def test_ours_is_picked_for_the_caches_that_stock_does_not_serve(asked):
    gpu, stock, answers, _ = asked
    for (sizes, cache), ours, theirs in zip(KEYS, answers, stock, strict=True):
        if cache == "fp8_ds_mla":
            assert ours["picked"] == theirs["picked"] == "FLASHMLA_SPARSE"
            continue
        assert (ours["cls"] or "").startswith(CLASSES[gpu]), (sizes, cache, ours["refused"])
        if gpu == "b200":
            assert ours["kv_cache_dtype"] == {"auto": "fp8_e4m3"}.get(cache, cache)
        # Stock has nothing for fp8_e4m3; for bf16 it calls FlashMLA's class valid, which raises.
        fp8 = ours["kv_cache_dtype"] == "fp8_e4m3"
        assert theirs["picked"] == (None if fp8 else "FLASHMLA_SPARSE")


def test_the_models_default_exchange_is_refused_and_the_other_named(asked):
    gpu, _, _, answer = asked
    assert answer["picked"] is None
    name = "FLASHINFER_MLA_SPARSE" if gpu == "b200" else "FLASH_ATTN_MLA_SPARSE"
    reason = " ".join(answer["refused"][name])
    assert "PCP with DCP needs --dcp-comm-backend ag_rs, got a2a" in reason
    assert f"works here: --dcp-comm-backend ag_rs (served by {name})" in reason
