import importlib.util
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dcp_mla import stock_workspace_bytes
from vllm_dcp_mla.compat.libraries import ASSUMED
from vllm_dcp_mla.models import load_config
from vllm_dcp_mla.planner import buffers
from vllm_dcp_mla.planner.lines import Counted
from vllm_dcp_mla.planner.model_spec import read_model_spec
from vllm_dcp_mla.planner.plan import largest, make_plan
from vllm_dcp_mla.planner.report import plan_json
from vllm_dcp_mla.planner.request import RawRequest, read_request
from vllm_dcp_mla.planner.workload import Workload
from vllm_dcp_mla.settings import Settings
from vllm_dcp_mla.simulate.gpus import GPUS, Gpu

DEFAULTS = {
    "model": "glm-5.2-fp8",
    "gpu": "b200",
    "tp": "8",
    "pcp": "1",
    "dcp": "8",
    "kv_cache_dtype": "auto",
    "max_num_batched_tokens": "8192",
    "comm": None,
}
ONE_TOKEN_OF_64_HEADS = 64 * 2048 + (1 << 20)
GIB = 1 << 30
KEYS = {
    *("ok", "problems", "warnings", "notes", "model", "topology", "backend", "workspace"),
    *("lines", "kv"),
    *("utilization", "batch", "memory", "stock_memory", "flags"),
}
SPEC = read_model_spec(load_config("glm-5.2"), "glm-5.2")
# The report of a failed start: GLM-5.2-NVFP4 on four B200, one rank for all heads.
PCP4_DCP4 = {
    "model": "glm-5.2-nvfp4",
    "tp": 1,
    "pcp": 4,
    "dcp": 4,
    "kv_cache_dtype": "fp8_ds_mla",
}


def workload(tokens):
    return Workload(tokens, SPEC.max_position_embeddings, 1024, 64, 0)


def planned(user_workspace=None, config=None, **flags):
    typed = {k: v if isinstance(v, bool) else str(v) for k, v in flags.items()}
    request = read_request(RawRequest(**{**DEFAULTS, **typed}))
    return make_plan(request, GPUS[request.gpu], ASSUMED, config or Settings(), user_workspace)


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


def line(plan, key):
    (found,) = [line for line in plan.lines if line.key == key]
    return found


def keys(plan):
    return {line.key for line in plan.lines}


def test_the_workspace_is_counted_here_and_outside_the_budget_with_stock():
    plan = planned()
    slab, scratch, counters = (line(plan, key) for key in ("slab", "scratch", "counters"))
    assert slab.bytes + scratch.bytes == plan.workspace.total_bytes
    assert slab.stock_bytes + scratch.stock_bytes == plan.workspace.stock_total_bytes
    assert counters.stock_bytes == 8192 * 64 * 4
    for each in (slab, scratch, counters):
        assert each.profiled
        assert each.stock_counted is Counted.OUTSIDE


def test_both_columns_add_up():
    plan = planned()
    for outcome, size, where in (
        (plan.ours, "bytes", "counted"),
        (plan.stock, "stock_bytes", "stock_counted"),
    ):
        counted = {
            kind: sum(getattr(x, size) for x in plan.lines if getattr(x, where) is kind)
            for kind in Counted
        }
        budget = outcome.budget
        assert budget.non_kv_bytes + budget.graphs_bytes == counted[Counted.BUDGET]
        assert budget.kv_bytes == budget.requested_bytes - counted[Counted.BUDGET]
        # What a step holds for moments may be where the profiled step's was.
        autotune, peak = (getattr(line(plan, key), size) for key in ("autotune", "peak"))
        moment = max(autotune, counted[Counted.MOMENT] - autotune - peak)
        assert budget.outside_bytes == counted[Counted.OUTSIDE] + moment
        assert outcome.kv.budget_bytes == budget.kv_bytes
    moved = sum(line(plan, key).bytes for key in ("slab", "scratch", "counters"))
    assert plan.stock.kv.budget_bytes - plan.ours.kv.budget_bytes == moved
    assert plan.ours.budget.free_bytes > plan.stock.budget.free_bytes


def test_moments_larger_than_the_profiled_step_need_room():
    plan = planned(dcp=8, tp=8, max_num_batched_tokens=65536, max_num_seqs=16)
    exchange = line(plan, "merge").bytes + line(plan, "attention").bytes
    peak, autotune = line(plan, "peak").bytes, line(plan, "autotune").bytes
    kept = sum(x.bytes for x in plan.lines if x.counted is Counted.OUTSIDE)
    assert plan.ours.budget.outside_bytes == kept + max(autotune, exchange - peak)


def test_the_report_of_a_negative_budget_is_reproduced():
    plan = planned(**PCP4_DCP4, max_num_batched_tokens=32768, graphs_gib=6.15)
    assert plan.ours.budget.kv_bytes < 0
    negative, _ = plan.problems
    assert "KV budget is -" in negative
    named = negative.partition("The largest lines: ")[2]
    assert named.count(" GiB") == 3
    assert "weights: routed experts" in named
    assert named.count("smaller with") == 3
    # 161.16 GiB were counted, with FlashInfer's workspace instead of FlashMLA's.
    budget = plan.ours.budget
    flashinfer = buffers.indexer_gather_bytes(SPEC, workload(32768), 4, 4)
    reported = budget.non_kv_bytes - line(plan, "gather").bytes + flashinfer
    assert reported / GIB == pytest.approx(161.16, rel=0.02)
    peak = line(plan, "peak")
    assert reported - peak.bytes + peak.low < 161.16 * GIB < reported - peak.bytes + peak.high


def test_the_way_out_of_that_report_works():
    plan = planned(**PCP4_DCP4, max_num_batched_tokens=4096, utilization=0.96)
    assert plan.problems == []
    low, high = plan.ours.kv.budget_bytes, plan.ours.kv_at_most.budget_bytes
    assert low < 29.45 * GIB < high
    assert plan.max_tokens >= 4096
    assert "--dcp-comm-backend ag_rs" in plan.flags


def test_the_report_of_failed_autotuning_is_reproduced():
    flags = {
        "model": "glm-5.2-nvfp4",
        "tp": 2,
        "pcp": 2,
        "dcp": 1,
        "max_num_batched_tokens": 32768,
        "max_model_len": 131072,
    }
    refused = planned(**flags, utilization=0.92)
    assert line(refused, "autotune").bytes / GIB == pytest.approx(12.22, abs=0.02)
    (problem,) = refused.problems
    assert "autotune headroom, 12.21 GiB" in problem
    accepted = planned(**flags, utilization=0.85)
    assert accepted.problems == []
    assert 0.85 < refused.ours.budget.max_safe_utilization < 0.92
    # vLLM had 33.46 GiB for its cache at 0.92.
    kv = (refused.ours.kv.budget_bytes / GIB, refused.ours.kv_at_most.budget_bytes / GIB)
    assert kv[0] < 33.46 < kv[1]


def test_a_smaller_step_takes_the_slab_from_16_to_2_gib():
    d = {"tp": 1, "pcp": 4, "dcp": 4}
    stock = [
        stock_workspace_bytes(SPEC.heads // d["tp"], d["dcp"], tokens) for tokens in (32768, 4096)
    ]
    assert [round(size / GIB, 2) for size in stock] == [16.39, 2.39]


def test_the_bf16_checkpoint_does_not_fit_eight_b200():
    plan = planned(model="glm-5.2")
    assert "routed experts" in plan.problems[0]
    assert plan.checkpoint_bytes > 8 * plan.ours.budget.requested_bytes
    assert plan.workspace.total_bytes == 951_058_432


def test_dcp_multiplies_the_tokens_but_for_what_it_costs():
    plan = planned(tp=4, dcp=4, kv_cache_dtype="fp8_e4m3", model="glm-5.2-nvfp4")
    kv = plan.ours.kv
    assert kv.tokens_logical == 4 * kv.tokens_per_rank
    assert 3.8 < plan.kv_gain < 4
    assert planned(dcp=1).kv_gain is None


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"max_model_len": 0}, "--max-model-len is 0"),
        ({"max_model_len": 2_000_000}, "--max-model-len is 2000000"),
        ({"max_num_seqs": 0}, "--max-num-seqs is 0"),
        ({"max_num_seqs": 9000}, "--max-num-seqs is 9000"),
        ({"block_size": 32}, "--block-size is 32"),
        ({"block_size": 0}, "--block-size is 0"),
        ({"utilization": 0}, "--utilization is 0"),
        ({"utilization": 1.2}, "--utilization is 1.2"),
        ({"mtp": -1}, "--mtp is -1"),
        ({"mtp": 99}, "--mtp is 99"),
        ({"context": 0}, "--context is 0"),
        ({"context": 200_000, "max_model_len": 131_072}, "--context is 200000"),
    ],
)
def test_sizes_that_vllm_refuses_are_named(flags, named):
    (problem,) = planned(**flags).problems
    assert problem.startswith(named)


def test_given_figures_replace_estimates():
    plan = planned(graphs_gib=2, autotune_gib=3, total_gib=200)
    assert line(plan, "graphs").bytes == 2 * GIB
    assert not line(plan, "graphs").is_estimate
    assert line(plan, "autotune").bytes == 3 * GIB
    assert plan.ours.budget.total_bytes == 200 * GIB
    assert "graphs" not in keys(planned(eager=True))
    assert planned(eager=True).flags[-1] == "--enforce-eager"


def test_mtp_adds_its_layer():
    plan, alone = planned(mtp=3), planned()
    assert "weights_drafter" in keys(plan) - keys(alone)
    assert plan.ours.kv.bytes_per_token == alone.ours.kv.bytes_per_token + 576 + 132
    assert line(plan, "topk").bytes == 2 * line(alone, "topk").bytes
    assert line(plan, "context_rows").bytes == line(alone, "context_rows").bytes * 3 // 2
    assert any("num_speculative_tokens 3" in flag for flag in plan.flags)


def test_every_line_but_small_ones_says_what_shrinks_it():
    for flags in ({}, {"mtp": 1}, PCP4_DCP4, {"kv_cache_dtype": "bfloat16"}):
        for each in planned(**flags).lines:
            assert each.shrink or each.bytes < 3 * GIB
            assert each.low <= each.bytes <= each.high
            assert "~" not in each.name


def test_estimates_at_their_high_ends_warn():
    plan = planned(utilization=0.975)
    assert plan.problems == []
    (warning,) = plan.warnings
    safe = plan.ours.worst.max_safe_utilization
    assert f"{safe:.4g}" in warning
    assert planned(utilization=safe).warnings == []


def test_the_largest_batch_works_and_the_next_does_not():
    plan = planned(utilization=0.955, max_model_len=131072)
    assert (
        planned(
            utilization=0.955, max_model_len=131072, max_num_batched_tokens=plan.max_tokens
        ).problems
        == []
    )
    assert planned(
        utilization=0.955, max_model_len=131072, max_num_batched_tokens=plan.max_tokens + 256
    ).problems


@pytest.mark.parametrize("limit", [0, 1, 5, 8, 9])
def test_the_search_finds_the_limit(limit):
    assert largest(lambda size: size <= limit, 1, 8) == (min(limit, 8) or None)


def test_a_request_longer_than_the_cache_names_the_longest():
    plan = planned(**{**PCP4_DCP4, "max_num_batched_tokens": 4096, "utilization": 0.88})
    (problem,) = [p for p in plan.problems if "not one request" in p]
    fits = plan.ours.kv.tokens_logical
    assert f"use {fits} or less" in problem
    assert (
        planned(
            **{
                **PCP4_DCP4,
                "max_num_batched_tokens": 4096,
                "utilization": 0.9,
                "max_model_len": fits,
            }
        ).problems
        == []
    )


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
    *refusals, way_out = planned(gpu="h100").problems
    assert [r.split()[0] for r in refusals] == [
        "FLASHINFER_MLA_SPARSE",
        "FLASH_ATTN_MLA_SPARSE_FA4",
        "FLASHMLA_SPARSE",
    ]
    assert "--kv-cache-dtype fp8_ds_mla" in way_out


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
