"""Backends, the attention workspace and flags of a plan."""

import importlib.util
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import DEFAULTS, PCP4_DCP4, keys, line, planned

from vllm_dcp_mla.compat.libraries import ASSUMED
from vllm_dcp_mla.compat.releases import release_of
from vllm_dcp_mla.gather_plan import DEFAULT_GATHER_LIMIT_BYTES
from vllm_dcp_mla.indexer.exchange import exchange_bytes
from vllm_dcp_mla.planner.lines import Counted
from vllm_dcp_mla.planner.plan import make_plan
from vllm_dcp_mla.planner.report import plan_json
from vllm_dcp_mla.planner.request import RawRequest, read_request
from vllm_dcp_mla.settings import Settings
from vllm_dcp_mla.simulate.gpus import GPUS, Gpu

ONE_TOKEN_OF_64_HEADS = 64 * 2048 + (1 << 20)
KEYS = {
    *("ok", "problems", "warnings", "notes", "model", "topology", "backend", "workspace"),
    *("lines", "kv", "utilization", "batch", "memory", "stock_memory", "flags"),
}


@pytest.mark.parametrize(
    ("flags", "heads", "tokens", "launches", "stock"),
    [
        ({}, 64, 4096, 2, 1_487_929_344),
        ({"max_num_batched_tokens": 16384}, 64, 4096, 4, 2_561_671_168),
        ({"model": "deepseek-v3.2"}, 128, 2048, 4, 2_561_671_168),
        ({"model": "deepseek-v3.2", "gpu": "b300"}, 128, 2048, 4, 2_561_671_168),
    ],
)
def test_the_workspace_is_bounded_where_stocks_grows(flags, heads, tokens, launches, stock):
    w = planned(**flags).workspace
    assert (w.heads, w.stock_heads) == (heads, heads)
    assert (w.tokens_per_launch, w.launches) == (tokens, launches)
    assert (w.slab_bytes, w.total_bytes) == (537_919_488, 951_058_432)
    assert w.stock_total_bytes == stock


def test_the_workspace_is_counted_here_and_outside_the_budget_with_stock():
    plan = planned()
    slab, scratch, counters = (line(plan, key) for key in ("slab", "scratch", "counters"))
    assert slab.bytes + scratch.bytes == plan.workspace.total_bytes
    assert slab.stock_bytes + scratch.stock_bytes == plan.workspace.stock_total_bytes
    assert counters.stock_bytes == 8192 * 64 * 4
    for each in (slab, scratch, counters):
        assert each.profiled
        assert each.stock_counted is Counted.OUTSIDE


def test_a_small_step_makes_a_small_slab():
    w = planned(max_num_batched_tokens=16).workspace
    assert (w.tokens_per_launch, w.launches) == (16, 1)
    assert w.slab_bytes == 16 * 64 * 2048 + (1 << 20)


def test_the_users_workspace_is_kept_and_split_finer():
    plan = planned(user_workspace=104_857_600)
    w = plan.workspace
    assert (w.tokens_per_launch, w.launches) == (280, math.ceil(8192 / 280))
    assert w.total_bytes == w.stock_total_bytes == 104_857_600
    assert any("1487929344" in note for note in plan.notes)


def test_a_large_users_workspace_is_no_warning():
    assert len(planned(user_workspace=2 << 30).notes) == len(planned().notes)


def test_a_users_workspace_below_one_token_is_a_problem():
    (problem,) = planned(user_workspace=64 << 20).problems
    assert str((64 << 20) + ONE_TOKEN_OF_64_HEADS) in problem


def test_the_slab_limit_is_honoured():
    limit = 100 * 64 * 2048 + (1 << 20)
    assert planned(config=Settings(slab_limit_bytes=limit)).workspace.tokens_per_launch == 100
    (problem,) = planned(config=Settings(slab_limit_bytes=ONE_TOKEN_OF_64_HEADS - 1)).problems
    assert str(ONE_TOKEN_OF_64_HEADS) in problem


def test_a_plugin_that_is_switched_off_is_a_warning():
    (said,) = planned(config=Settings(disable=True)).warnings
    assert said.startswith("VLLM_DCP_MLA_DISABLE is set")
    assert planned().warnings == []


def test_a_merge_limit_below_one_row_is_a_problem():
    needed = exchange_bytes(1, 2048, 8)
    small = Settings(merge_limit_bytes=needed - 1)
    (problem,) = planned(config=small).problems
    assert str(needed) in problem
    assert "VLLM_DCP_MLA_MERGE_LIMIT_BYTES" in problem
    assert not planned(config=Settings(merge_limit_bytes=needed)).problems
    assert not planned(config=small, dcp=1).problems


def test_without_dcp_the_workspace_is_stocks():
    plan = planned(dcp=1)
    w = plan.workspace
    assert (w.heads, w.slab_bytes) == (8, 0)
    assert w.total_bytes == w.stock_total_bytes == 413_138_944
    assert line(plan, "scratch").counted is Counted.OUTSIDE
    assert plan.served_by is None


@pytest.mark.parametrize(
    "flags",
    [
        {"gpu": "h200", "dcp": 1},
        {"gpu": "h200", "kv_cache_dtype": "fp8_ds_mla"},
        {"kv_cache_dtype": "fp8_ds_mla"},
        {"kv_cache_dtype": "fp8_ds_mla", "dcp": 1},
    ],
)
def test_without_trtllm_gen_there_is_no_workspace(flags):
    plan = planned(**flags)
    w = plan.workspace
    assert (w.tokens_per_launch, w.slab_bytes, w.total_bytes, w.stock_total_bytes) == (0, 0, 0, 0)
    assert w.heads > 0
    assert not keys(plan) & {"slab", "scratch", "counters"}
    if "dcp" not in flags:
        assert any("no trtllm-gen workspace" in note for note in plan.notes)


def test_what_every_backend_refuses_names_each_and_a_way_out():
    flags = {"gpu": "h100", "tp": 2, "dcp": 2, "kv_cache_dtype": "fp8_ds_mla"}
    *refusals, way_out = planned(**flags).problems
    assert [r.split()[0] for r in refusals] == [
        "FLASHINFER_MLA_SPARSE",
        "FLASH_ATTN_MLA_SPARSE_FA4",
        "FLASH_ATTN_MLA_SPARSE",
        "FLASHMLA_SPARSE",
    ]
    assert "--kv-cache-dtype fp8_e4m3 (served by FLASH_ATTN_MLA_SPARSE)" in way_out


@pytest.mark.parametrize("model", ["glm-5.2", "deepseek-v3.2"])
@pytest.mark.parametrize("tokens", [512, 32768])
def test_hoppers_workspace_is_of_the_device_alone(model, tokens):
    plan = planned(model=model, gpu="h200", max_num_batched_tokens=tokens)
    assert plan.served_by == "FLASH_ATTN_MLA_SPARSE"
    partials = line(plan, "partials")
    assert plan.workspace.total_bytes == 132 * 64 * (512 + 576) * 2 == partials.bytes
    assert partials.profiled
    assert partials.stock_bytes == 0


@pytest.mark.parametrize("gpu", ["b200", "h200"])
@pytest.mark.parametrize(
    ("cache", "length", "seqs", "size"),
    [
        ("fp8_e4m3", 1024, 4, 4 * 1024 * 576),  # all requests of a step
        ("bfloat16", 1024, 4, 4 * 1024 * 1152),
        ("fp8_e4m3", 1_048_576, 64, DEFAULT_GATHER_LIMIT_BYTES),
    ],
)
def test_pcp_with_dcp_gathers_keys_in_a_bounded_workspace(gpu, cache, length, seqs, size):
    flags = {"gpu": gpu, "max_model_len": length, "max_num_seqs": seqs, "kv_cache_dtype": cache}
    plan = planned(**{**PCP4_DCP4, **flags})
    gathered = line(plan, "pcp_gather")
    # The last page and the last partial result may not fit.
    assert size - 64 * 1152 * 4 - 64 * 1024 <= gathered.bytes <= size
    assert gathered.profiled
    assert gathered.stock_bytes == 0
    assert "pcp_gather" not in keys(planned(gpu=gpu))
    assert "pcp_gather" not in keys(planned(**{**PCP4_DCP4, "gpu": gpu}))  # stock's FlashMLA


def test_a_gather_limit_that_holds_no_row_is_a_problem():
    config = Settings(gather_limit_bytes=1000)
    plan = planned(config=config, **{**PCP4_DCP4, "kv_cache_dtype": "fp8_e4m3"})
    assert any("gather_limit_bytes is 1000" in problem for problem in plan.problems)


def test_the_way_out_of_pcp_with_dcp_names_the_exchange():
    flags = {"model": "glm-5.2", "tp": 1, "pcp": 4, "dcp": 4, "kv_cache_dtype": "nvfp4_ds_mla"}
    assert "--dcp-comm-backend ag_rs" in planned(**flags).problems[-1]


def test_no_way_out_says_to_leave_dcp_out():
    request = read_request(RawRequest(**DEFAULTS))
    ampere = Gpu("a100", (8, 0), 108, 80 << 30)
    plan = make_plan(request, ampere, ASSUMED, Settings(), None)
    assert plan.problems[-1].endswith("leave out --decode-context-parallel-size.")


def test_flags_name_the_exchange_where_the_default_would_not_do():
    flags = planned(**PCP4_DCP4, max_model_len=131072).flags
    assert flags == [
        "--tensor-parallel-size 1",
        "--prefill-context-parallel-size 4",
        "--decode-context-parallel-size 4",
        "--dcp-comm-backend ag_rs",
        "--kv-cache-dtype fp8_ds_mla",
        "--max-num-batched-tokens 8192",
        "--max-model-len 131072",
    ]
    assert not any("--dcp-comm-backend" in flag for flag in planned().flags)
    assert "--dcp-comm-backend ag_rs" in planned(comm="ag_rs").flags


@pytest.mark.parametrize(
    ("model", "gpu", "kv"),
    [
        ("glm-5.2", "b200", "fp8_e4m3"),
        ("glm-5.2", "h200", "bfloat16"),
        ("deepseek-v3.2", "b200", "bfloat16"),
    ],
)
def test_auto_is_resolved_as_the_model_does(model, gpu, kv):
    assert planned(model=model, gpu=gpu, dcp=1).kv_cache_dtype == kv


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_the_counter_buffer_is_the_one_that_is_made():
    import torch

    from vllm_dcp_mla import device_buffer
    from vllm_dcp_mla.workspace import plan_workspace

    plan = plan_workspace(64, 100, scratch_bytes=65 << 20)
    buffers = device_buffer._allocate(torch.device("meta"), plan)
    assert buffers.counters.numel() == plan.counter_bytes(num_sms=1)


sizes = st.one_of(st.integers(-2, 40), st.sampled_from([64, 128, 1024, 10**12]))


@settings(max_examples=150, deadline=None)
@given(
    model=st.sampled_from(["glm-5.2-nvfp4", "deepseek-v3.2"]),
    gpu=st.sampled_from(sorted(GPUS)),
    tp=sizes,
    pcp=st.one_of(st.just(1), sizes),
    dcp=sizes,
    kv_cache_dtype=st.sampled_from(["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla"]),
    max_num_batched_tokens=st.one_of(st.integers(-2, 10**6), st.just(10**20)),
    comm=st.sampled_from(["ag_rs", "a2a"]),
    user_workspace=st.one_of(st.none(), st.integers(1, 4 << 30)),
)
def test_any_request_has_an_answer(user_workspace, **flags):
    plan = planned(user_workspace, **flags)
    w = plan.workspace
    assert bool(plan.problems) != bool(plan.flags)
    assert (plan.ours is None) == (plan.lines == [])
    assert all(problem.endswith(".") for problem in plan.problems)
    if w.slab_bytes:
        assert plan.ours is not None
        assert w.slab_bytes + 1 <= w.total_bytes
        assert (w.launches - 1) * w.tokens_per_launch < flags["max_num_batched_tokens"]
        assert w.launches * w.tokens_per_launch >= flags["max_num_batched_tokens"]
        assert w.slab_bytes <= 537_919_488
    assert set(plan_json(None, plan)) == KEYS


@pytest.mark.parametrize(("version", "kv"), [("0.31.0", "bfloat16"), ("0.32.0", "fp8_e4m3")])
def test_auto_is_resolved_as_the_installed_release_does(version, kv):
    request = read_request(RawRequest("glm-5.2", "b200", "8", "1", "8", "auto", "8192", None))
    libraries = replace(ASSUMED, release=release_of(version))
    assert make_plan(request, GPUS["b200"], libraries, Settings(), None).kv_cache_dtype == kv
