"""The budget's arithmetic, and the reports it must reproduce from their figures."""

import pytest

from vllm_dcp_mla.models import load_config
from vllm_dcp_mla.planner.budget import Budget
from vllm_dcp_mla.planner.figures import RawFigures, plan_figures, read_figures
from vllm_dcp_mla.planner.kv_cache import KvCapacity, cache_rows, gain, row_bytes
from vllm_dcp_mla.planner.model_spec import read_model_spec
from vllm_dcp_mla.planner.request import RequestError

GIB = 1 << 30
GLM = read_model_spec(load_config("glm-5.2"), "")
#: vllm-project/vllm#55879: a negative budget, and an autotuning that ran out of memory.
NEGATIVE = {"total_gib": "178.35", "non_kv_gib": "161.16", "graphs_gib": "6.15"}
AUTOTUNE = {"total_gib": "178.35", "kv_gib": "33.46", "free_gib": "7.6", "autotune_gib": "12.22"}


def planned(**figures):
    return plan_figures(read_figures(RawFigures(**figures)))


def refused(**figures):
    with pytest.raises(RequestError) as caught:
        read_figures(RawFigures(**figures))
    return caught.value


def test_a_negative_budget_is_refused_and_its_way_out_named():
    plan = planned(**NEGATIVE)
    assert plan.budget.kv_bytes / GIB == pytest.approx(-3.23, abs=0.005)
    (problem,) = plan.problems
    assert "-3.23 GiB" in problem
    assert "161.16 GiB" in problem
    assert "6.15 GiB" in problem
    assert plan.budget.to_keep_kv == 0.9545
    assert plan.budget.without_graphs == 0.8855


def test_the_same_with_a_larger_share_fits():
    plan = planned(**NEGATIVE, utilization="0.96")
    assert plan.problems == []
    assert plan.budget.kv_bytes / GIB == pytest.approx(3.91, abs=0.01)


def test_the_smallest_share_is_the_smallest():
    least = planned(**NEGATIVE).budget.utilization_for_any_kv
    assert planned(**NEGATIVE, utilization=f"{least:.4f}").budget.kv_bytes >= 0
    assert planned(**NEGATIVE, utilization=f"{least - 0.0001:.4f}").budget.kv_bytes < 0


def test_autotuning_is_refused_at_092_and_accepted_at_085():
    at_92 = planned(**AUTOTUNE, utilization="0.92")
    (problem,) = at_92.problems
    assert "12.22 GiB" in problem
    assert "7.60 GiB are free" in problem
    assert 0.85 < at_92.budget.max_safe_utilization < 0.92
    at_85 = planned(**AUTOTUNE, utilization="0.85")
    assert at_85.problems == []
    # What the share gives up is free beside the cache.
    freed = 0.07 * 178.35
    assert at_85.budget.kv_bytes / GIB == pytest.approx(33.46 - freed, abs=0.01)
    assert at_85.budget.free_bytes / GIB == pytest.approx(7.6 + freed - 12.22, abs=0.01)


def test_the_largest_safe_share_is_accepted_and_no_larger_one():
    safe = planned(**AUTOTUNE).budget.max_safe_utilization
    assert planned(**AUTOTUNE, utilization=f"{safe}").problems == []
    assert planned(**AUTOTUNE, utilization=f"{safe + 0.0001:.4f}").problems


def test_figures_of_another_share_are_moved():
    at_85 = {"kv_gib": "20.9755", "free_gib": "20.0845", "logged_utilization": "0.85"}
    plan = planned(**{**AUTOTUNE, **at_85}, utilization="0.92")
    assert plan.budget.kv_bytes / GIB == pytest.approx(33.46, abs=0.001)
    assert len(plan.problems) == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"total_gib": None}, "--total-gib is missing"),
        ({"total_gib": "0"}, "--total-gib is missing"),
        ({"total_gib": "lots"}, "--total-gib is 'lots'"),
        ({"total_gib": "-1"}, "--total-gib is -1"),
        ({"total_gib": "1e9"}, "--total-gib is 1e9"),
        ({"total_gib": "nan"}, "--total-gib is 'nan'"),
        ({"non_kv_gib": None}, "Give --non-kv-gib or --kv-gib"),
        ({"graphs_gib": "-2"}, "--graphs-gib is -2"),
        ({"utilization": "0"}, "--utilization is 0"),
        ({"utilization": "92"}, "--utilization is 92"),
        ({"logged_utilization": "-1"}, "--logged-utilization is -1"),
    ],
)
def test_figures_that_are_none_are_named(change, named):
    error = refused(**{**NEGATIVE, **change})
    assert error.exit_code == 2
    (problem,) = error.problems
    assert problem.startswith(named)


def test_a_negative_cache_of_a_log_is_taken():
    plan = planned(total_gib="178.35", kv_gib="-3.23", graphs_gib="6.15")
    assert plan.budget.non_kv_bytes / GIB == pytest.approx(161.16, abs=0.01)


@pytest.mark.parametrize(
    ("cache", "expected"), [("fp8_ds_mla", 54_728), ("fp8_e4m3", 48_408), ("bfloat16", 93_912)]
)
def test_bytes_of_a_token_with_mtp(cache, expected):
    row = row_bytes(cache, GLM.cache_row_width)
    assert cache_rows(GLM, row, drafter=True).bytes_per_token == expected


def test_bytes_of_a_token_with_the_row_of_another_format():
    # A fork packs NVFP4 rows in 432 bytes; vLLM 0.33 in 352.
    assert cache_rows(GLM, 432, drafter=True).bytes_per_token == 37_032
    assert row_bytes("nvfp4_ds_mla", GLM.cache_row_width) == 352


def test_index_caches_are_kept_by_layers_with_an_indexer_only():
    assert cache_rows(GLM, 0, drafter=False).bytes_per_token == 21 * 132


def test_tokens_of_a_rank_and_of_requests_are_two_units():
    kv = KvCapacity(bytes_per_token=100, budget_bytes=690_240 * 100, block_size=64, dcp=8)
    assert (kv.tokens_per_rank, kv.tokens_logical) == (690_240, 5_521_920)
    assert kv.block_tokens == 512
    assert kv.requests(1_000_000) > 5
    assert KvCapacity(1, 3_307_840, 64, 8).tokens_logical == 26_462_720
    assert KvCapacity(1, 171_712, 64, 8).tokens_logical == 1_373_696


def test_the_gain_of_dcp4_is_what_vllm_reported():
    row = cache_rows(GLM, 576, drafter=False).bytes_per_token
    alone = KvCapacity(row, 2_765_568 * row, 64, 1)
    shared = KvCapacity(row, 10_853_376 // 4 * row, 64, 4)
    assert alone.reported_tokens(131072) == 2_765_568
    assert shared.reported_tokens(131072) == 10_853_376
    assert round(gain(alone, shared), 2) == 3.92
    assert gain(KvCapacity(row, 0, 64, 1), shared) is None


def test_a_request_takes_whole_blocks_on_every_rank():
    kv = KvCapacity(1, 64 * 10, 64, 4)
    assert [kv.blocks_per_request(tokens) for tokens in (1, 256, 257)] == [1, 1, 2]
    assert KvCapacity(1, -5, 64, 4).tokens_logical == 0


def test_the_budget_rounds_as_vllm_does():
    budget = Budget(total_bytes=1001, utilization=0.5, non_kv_bytes=100)
    assert (budget.requested_bytes, budget.slack_bytes) == (501, 500)
