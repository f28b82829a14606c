"""What the lines of a plan add up to, and the reports that they must reproduce."""

import pytest
from plans import PCP4_DCP4, keys, line, planned

from vllm_dcp_mla import stock_workspace_bytes
from vllm_dcp_mla.models import load_config
from vllm_dcp_mla.planner import buffers
from vllm_dcp_mla.planner.lines import Counted
from vllm_dcp_mla.planner.model_spec import read_model_spec
from vllm_dcp_mla.planner.plan import largest
from vllm_dcp_mla.planner.workload import Workload

GIB = 1 << 30
SPEC = read_model_spec(load_config("glm-5.2"), "glm-5.2")


def workload(tokens):
    return Workload(tokens, SPEC.max_position_embeddings, 1024, 64, 0)


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
