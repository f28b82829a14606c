"""The planner's formulas beside stock vLLM's own classes; see stock_memory.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from stock_memory import ANSWER

from vllm_dcp_mla.models import load_config
from vllm_dcp_mla.planner import buffers
from vllm_dcp_mla.planner.kv_cache import cache_rows, row_bytes
from vllm_dcp_mla.planner.model import read_model
from vllm_dcp_mla.planner.weights import Kind, rank_weights
from vllm_dcp_mla.planner.workload import Workload

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SIZES = {"max_model_len": 131072, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
CASES = {
    "GLM-5.2-FP8, TP8, MTP": {
        **SIZES,
        "model": "glm-5.2-fp8",
        "tp": 8,
        "kv_cache_dtype": "fp8_e4m3",
        "mtp": 3,
    },
    "GLM-5.2-NVFP4, PCP4 DCP4": {
        **SIZES,
        "model": "glm-5.2-nvfp4",
        "tp": 1,
        "pcp": 4,
        "dcp": 4,
        "comm": "ag_rs",
        "kv_cache_dtype": "fp8_ds_mla",
        "max_model_len": 1048576,
        "max_num_batched_tokens": 4096,
    },
    "DeepSeek-V3.2, TP8": {
        **SIZES,
        "model": "deepseek-v3.2",
        "tp": 8,
        "kv_cache_dtype": "bfloat16",
        "max_model_len": 163840,
        "max_num_seqs": 16,
    },
}


@pytest.fixture(scope="module")
def stock():
    """What stock says of every case, by name."""
    asked = []
    for case in CASES.values():
        sizes = {key: value for key, value in case.items() if key != "model"}
        asked.append({**sizes, "config": load_config(case["model"])})
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("stock_memory.py"))],
        input=json.dumps({"gpu": "b200", "cases": asked}),
        env={n: v for n, v in os.environ.items() if not n.startswith(("VLLM_", "TRITON_"))},
        capture_output=True,
        text=True,
        timeout=900,
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    assert answers, done.stderr[-3000:]
    return dict(zip(CASES, json.loads(answers[0][len(ANSWER) :]), strict=True))


@pytest.fixture(params=CASES)
def case(request):
    return request.param


def model_of(case):
    name = CASES[case]["model"]
    return read_model(name, load_config(name))


def workload_of(case):
    c = CASES[case]
    return Workload(
        c["max_num_batched_tokens"], c["max_model_len"], c["max_num_seqs"], 64, c.get("mtp", 0)
    )


def topology_of(case):
    c = CASES[case]
    return c["tp"], c.get("pcp", 1), c.get("dcp", 1)


def test_weights_of_a_rank(stock, case):
    model, (tp, pcp, _) = model_of(case), topology_of(case)
    ours = rank_weights(model.weights, model.spec, tp, pcp, drafter=True)
    loaded = sum(size for kind, size in ours.items() if kind not in (Kind.DRAFTER, Kind.ABSORBED))
    if model.fp4_experts:
        # Scalars of every expert are on every rank, and there is one more for each attention.
        assert loaded == pytest.approx(stock[case]["weights"], rel=1e-4)
    else:
        assert loaded == stock[case]["weights"]
    if stock[case]["drafter"]:
        shared = 2 * 2 * model.spec.vocab_size // tp * model.spec.hidden_size
        assert ours[Kind.DRAFTER] == stock[case]["drafter"] - shared


def test_rotary_tables(stock, case):
    assert model_of(case).spec.rope_table_bytes == stock[case]["rope"]


def test_bytes_of_a_cache_block(stock, case):
    spec, w = model_of(case).spec, workload_of(case)
    row = row_bytes(CASES[case]["kv_cache_dtype"], spec.cache_row_width)
    per_token = cache_rows(spec, row, drafter=w.spec_tokens > 0).bytes_per_token
    assert 64 * per_token == stock[case]["block_bytes"]


def test_buffers_for_chosen_tokens(stock, case):
    spec, w = model_of(case).spec, workload_of(case)
    assert w.decode_rows == stock[case]["index_group_rows"]
    assert buffers.index_group_bytes(spec, w) == stock[case]["index_groups"]
    models = 1 + (w.spec_tokens > 0)
    assert buffers.topk_buffer_bytes(spec, w) == models * stock[case]["topk"]


def test_block_tables_and_context(stock, case):
    spec, w, (_, _, dcp) = model_of(case).spec, workload_of(case), topology_of(case)
    assert buffers.block_table_width(w, dcp) == stock[case]["block_table_width"]
    assert buffers.context_rows(spec, w, dcp) == stock[case]["context_rows"]


def test_direct_exchanges(stock, case):
    rows = buffers.symmetric_rows(workload_of(case), largest_graph=1024)
    assert rows == stock[case]["symmetric_rows"]


def test_the_shared_workspace(stock, case):
    spec, w, (tp, pcp, dcp) = model_of(case).spec, workload_of(case), topology_of(case)
    copies = 3 if pcp > 1 and dcp > 1 else 1
    rows = stock[case]["indexer_rows"]
    assert buffers.indexer_gather_bytes(spec, w, pcp, dcp) == copies * rows * 132 + (1 << 20)
    if CASES[case]["kv_cache_dtype"] == "fp8_ds_mla":
        ours = buffers.flashmla_gather_bytes(spec, w, spec.heads // tp, tp, pcp, dcp)
        assert ours == stock[case]["reserved"]
    else:
        # The dense prefill backend's, where it reserves any, is smaller than the indexer's.
        assert stock[case]["reserved"] in (0, 394 << 20)
        assert stock[case]["reserved"] < buffers.indexer_gather_bytes(spec, w, pcp, dcp)
