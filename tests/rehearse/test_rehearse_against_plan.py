import json
import math
import re
from dataclasses import replace

import pytest
from rehearse_results import held, rank

from vllm_dcp_mla.key_splits import partial_bytes
from vllm_dcp_mla.planner.lines import Counted
from vllm_dcp_mla.rehearse import against_plan
from vllm_dcp_mla.rehearse.against_plan import (
    MemoryLine,
    compare,
    judge_budget,
    judge_lines,
    judge_memory,
    summary,
)
from vllm_dcp_mla.rehearse.config import small_config
from vllm_dcp_mla.rehearse.configuration import Configuration
from vllm_dcp_mla.rehearse.engine import EngineSpec
from vllm_dcp_mla.rehearse.schedule import EngineResult
from vllm_dcp_mla.simulate.gpus import GPUS

GIB = 1 << 30
#: Of an engine without PCP, with the B200 class.
HELD = against_plan.TO_THE_BYTE - {"partials", "pcp_gather"}
ONE = Configuration("glm-5.2", 2, 1, 2, "bfloat16", "ag_rs", 0, "none", "reference")


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(small_config("glm-5.2")))
    return EngineSpec(
        **{"name": ONE.name, "model": str(tmp_path), "tp": 2, "dcp": 2, "comm": "ag_rs"},
        **{"kv_cache_dtype": "bfloat16", "kernel": "reference", "shared": True},
        **{"max_model_len": 12352, "max_num_batched_tokens": 8192},
        **{"kv_cache_bytes": 2 * GIB, "utilization": 0.05},
    )


def ranks_of(spec):
    """What ranks answer that hold what was planned."""
    return [{**rank(n, [], strict=True), "held": held(spec)} for n in range(spec.world)]


def line(key, planned, *held, judged="bytes", not_read=""):
    return MemoryLine(key, f"the {key}", planned, held, judged, not_read)


def test_what_was_planned_is_good(spec):
    found = compare(spec, ranks_of(spec))
    assert (found.problems, found.off_bytes, found.off_share) == ((), 0, 0)
    by_key = {x.key: x for x in found.lines}
    exact = {key for key, x in by_key.items() if x.judged == "bytes"}
    assert exact == HELD
    summed = {key for key, x in by_key.items() if x.judged == "sum"}
    assert summed == {"weights", "rope", "counters", "context_rows", "indexer_state"}
    assert by_key["kv.block_bytes"].held == (64 * (3 * 576 * 2 + 2 * 132),) * 2
    assert by_key["topk"].planned == 8192 * 2048 * 4
    # 8 requests, two tables; 97 blocks of 64 tokens on each of 2 ranks, rounded to 128 tokens.
    assert by_key["block_tables"].planned == 2 * 8 * 98 * 4 + 8192 * 8


def test_the_reference_kernel_has_the_workspace_of_sm100_on_any_gpu(spec):
    plan = against_plan.plan_of(spec, GPUS["h200"], 64)
    assert plan.workspace.total_bytes == 951_058_432
    stock = against_plan.plan_of(
        spec.model_copy(update={"kernel": "auto", "tp": 4, "kv_cache_dtype": "fp8_ds_mla"}),
        GPUS["h200"],
        64,
    )
    assert stock.served_by == "FLASHMLA_SPARSE"
    assert not {x.key for x in stock.lines} & {"slab", "scratch", "counters"}


def test_the_plan_is_of_the_engine_s_flags(spec):
    def planned(**changed):
        plan = against_plan.plan_of(spec.model_copy(update=changed), GPUS["h200"], 64)
        sizes = {x.key: x.bytes for x in plan.lines}
        return {**sizes, "kv": plan.ours.kv.block_bytes, "rank": plan.ours.kv.dcp}

    plain = planned()
    assert planned(max_num_batched_tokens=4096)["topk"] == plain["topk"] // 2
    assert planned(max_model_len=6144)["gather"] < plain["gather"]
    assert planned(kv_cache_dtype="fp8_e4m3")["kv"] < plain["kv"]
    assert planned(mtp=1)["weights_drafter"] > 0
    assert "weights_drafter" not in plain
    assert planned(tp=4)["weights_heads"] == plain["weights_heads"] // 2
    assert "graphs" not in plain
    assert planned(graphs="full")["graphs"] > 0
    assert planned(dcp=1)["rank"] == 1


@pytest.mark.parametrize("key", sorted(HELD))
def test_one_byte_of_a_line_is_found(spec, key):
    ranks = ranks_of(spec)
    ranks[1]["held"]["lines"][key] += 1
    found = compare(spec, ranks)
    (problem,) = found.problems
    planned = ranks[0]["held"]["lines"][key]
    assert f"({key}): rank 1 holds {planned + 1:,} bytes, planned were {planned:,}." in problem
    assert found.off_bytes == 1


def test_the_sum_may_be_two_percent_apart(spec):
    for off, wrong in ((0.019, False), (0.021, True), (-0.021, True)):
        ranks = ranks_of(spec)
        lines = ranks[1]["held"]["lines"]
        planned = sum(lines.values()) - lines["kv.block_bytes"]
        lines["weights"] += int(off * planned)
        found = compare(spec, ranks)
        assert bool(found.problems) is wrong
        assert found.off_share == pytest.approx(abs(off), rel=1e-6)
        if wrong:
            assert re.fullmatch(
                r"the compared lines together: rank 1 holds [\d,]+ bytes, planned were "
                r"[\d,]+, 2.1% apart, accepted 2%.",
                found.problems[0],
            )


def test_a_line_of_which_every_rank_holds_nothing_is_part_of_the_sum(spec):
    ranks = ranks_of(spec)
    for one in ranks:
        one["held"]["lines"]["weights"] = 0
    (problem, _) = compare(spec, ranks).problems
    assert problem.startswith("the compared lines together: rank 0 holds ")


def test_what_only_one_side_has_is_listed(spec):
    ranks = ranks_of(spec)
    for one in ranks:
        del one["held"]["lines"]["context_rows"]
        one["held"]["lines"]["mla_state"] = 5 * GIB
    found = compare(spec, ranks)
    assert found.problems == ()
    by_key = {x.key: x for x in found.lines}
    assert (by_key["context_rows"].held, by_key["context_rows"].judged) == ((None, None), None)
    assert (by_key["mla_state"].planned, by_key["mla_state"].judged) == (None, None)
    assert by_key["mla_state"].name == "MLA builders' other buffers"
    assert by_key["peak"].judged is None, "an estimate"
    assert "merge" not in by_key, "held for a moment"


def test_a_rank_that_lacks_what_another_has_is_wrong_unless_it_says_why(spec):
    ranks = ranks_of(spec)
    gone = ranks[1]["held"]["lines"].pop("topk")
    (problem,) = compare(spec, ranks).problems
    assert f"(topk): rank 1 holds 0 bytes, planned were {gone:,}." in problem
    ranks[1]["held"]["not_read"]["topk"] = "AttributeError: no buffer"
    found = compare(spec, ranks)
    assert found.problems == ()
    assert summary(found.lines).endswith("; not read: topk (AttributeError: no buffer).")


#: Engines and what ranks of each hold to the byte, beside what every rank holds.
EVERY = HELD - {"slab", "scratch"}
ENGINES = {
    "the B200 class": ({}, {"slab", "scratch"}),
    "the B200 class, PCP with DCP": ({"tp": 1, "pcp": 2}, {"slab", "scratch", "pcp_gather"}),
    "Hopper's class": ({"kernel": "auto", "kv_cache_dtype": "fp8_e4m3"}, {"partials"}),
    "Hopper's class, PCP with DCP": (
        {"kernel": "auto", "tp": 1, "pcp": 2},
        {"partials", "pcp_gather"},
    ),
    "FlashMLA": ({"kernel": "auto", "tp": 8, "kv_cache_dtype": "fp8_ds_mla"}, set()),
    "FlashMLA, PCP with DCP, MTP": (
        {"kernel": "auto", "tp": 1, "pcp": 2, "kv_cache_dtype": "fp8_ds_mla", "mtp": 1},
        set(),
    ),
    "no DCP": ({"kernel": "auto", "dcp": 1}, set()),
    "no DCP, PCP": ({"dcp": 1, "tp": 1, "pcp": 2}, set()),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_what_no_rank_holds_is_wrong_where_the_configuration_has_it(spec, engine):
    changed, own = ENGINES[engine]
    one = spec.model_copy(update=changed)
    assert compare(one, ranks_of(one)).problems == ()
    for key in EVERY | own:
        ranks = ranks_of(one)
        (planned,) = {each["held"]["lines"].pop(key) for each in ranks}
        found = compare(one, ranks)
        (problem,) = found.problems
        assert problem.startswith("no rank holds ")
        assert problem.endswith(f" ({key}), planned were {planned:,} bytes of each.")
        assert (found.off_bytes, found.off_share) == (planned, 0)
        for each in ranks:
            each["held"]["not_read"][key] = "it moved"
        assert compare(one, ranks).problems == (), "a reader that found nothing to read"
    ranks = ranks_of(one)
    assert not against_plan.TO_THE_BYTE & set(ranks[0]["held"]["lines"]) - EVERY - own


def test_stock_s_workspace_without_dcp_is_read_by_no_reader(spec):
    """The B200 class of stock, which makes it when it first attends."""
    alone = spec.model_copy(update={"dcp": 1, "kernel": "auto"})
    ranks = ranks_of(alone)
    for each in ranks:
        each["held"]["gpu"] |= {"arch": [10, 0]}
        assert "scratch" not in each["held"]["lines"]
    found = compare(alone, ranks)
    by_key = {x.key: x for x in found.lines}
    assert by_key["scratch"].planned > 0
    assert (by_key["scratch"].judged, found.problems) == (None, ())


def test_nothing_read_is_no_success(spec):
    ranks = ranks_of(spec)
    for one in ranks:
        one["held"]["not_read"] = dict.fromkeys(one["held"]["lines"], "gone")
        one["held"]["lines"] = {}
    found = compare(spec, ranks)
    assert found.problems == ("no line was compared to the byte; see what was not read.",)
    assert "compared to the byte: nothing" in summary(found.lines)


def test_hopper_s_class_has_its_workspace(spec):
    hopper = spec.model_copy(update={"kernel": "auto"})
    found = compare(hopper, ranks_of(hopper))
    assert found.problems == ()
    by_key = {x.key: x for x in found.lines}
    assert by_key["partials"].judged == "bytes"
    assert by_key["partials"].planned == partial_bytes(512, GPUS["h200"].sms)
    assert not {"slab", "scratch"} & set(by_key)


def test_pcp_gathers_in_a_workspace_of_its_own(spec):
    both = spec.model_copy(update={"tp": 1, "pcp": 2})
    found = compare(both, ranks_of(both))
    assert found.problems == ()
    assert {x.key for x in found.lines if x.judged == "bytes"} == HELD | {"pcp_gather"}
    (planned,) = (x.planned for x in found.lines if x.key == "pcp_gather")
    pages = math.ceil(12352 / 2 / 64)
    assert planned == 64 * 576 * 2 * 2 * 8 * pages, "8 requests, of whole pages on each rank"


@pytest.mark.parametrize(
    ("name", "value", "size"),
    [
        ("VLLM_DCP_MLA_SLAB_LIMIT_BYTES", "135266304", 548_405_248),
        ("VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE", "104857600", 104_857_600),
        ("VLLM_DCP_MLA_GATHER_LIMIT_BYTES", "1", 951_058_432),
    ],
)
def test_a_workspace_has_the_size_that_was_set(spec, monkeypatch, name, value, size):
    monkeypatch.setenv(name, value)
    lines = {x.key: x.bytes for x in against_plan.plan_of(spec, GPUS["h200"], 64).lines}
    assert lines["slab"] + lines["scratch"] == size


def test_what_cannot_be_planned_is_said(spec):
    broken = spec.model_copy(update={"kernel": "auto", "kv_cache_dtype": "nvfp4_ds_mla"})
    found = compare(broken, ranks_of(spec))
    assert found.lines == ()
    assert all(problem.startswith("plan: ") for problem in found.problems)
    assert any("nvfp4_ds_mla" in problem for problem in found.problems)


def test_lines_are_judged_rank_by_rank():
    found = judge_lines([line("slab", 100, 100, 90), line("weights", 900, 900, 910, judged="sum")])
    assert [p.partition(" holds")[0] for p in found.problems] == ["the slab (slab): rank 1"]
    assert against_plan.totals(found.lines) == [(1000, 1000), (1000, 1000)]
    assert found.off_share == 0


def test_a_block_s_bytes_are_no_part_of_the_sum():
    found = judge_lines([line("kv.block_bytes", 10**9, 10**9), line("topk", 10, 10)])
    assert against_plan.totals(found.lines) == [(10, 10)]


def test_the_budget_counts_with_a_gpu_each(spec):
    alone = spec.model_copy(update={"shared": False, "kv_cache_bytes": None, "utilization": 0.8})
    plan = against_plan.plan_of(alone, GPUS["h200"], 64)
    planned = plan.ours.kv.tokens_logical
    kv_bytes = 0.8 * GPUS["h200"].memory_bytes - sum(
        x.bytes for x in plan.lines if x.counted is Counted.BUDGET
    )
    assert planned == pytest.approx(2 * kv_bytes / plan.ours.kv.bytes_per_token, rel=1e-4)
    for share, wrong in ((0.985, False), (0.95, True), (1.05, True)):
        said, problems = judge_budget(plan, [planned, int(planned * share)])
        assert bool(problems) is wrong
        assert said.judged == "range"
        if wrong:
            assert problems[0].startswith(f"the KV cache: rank 1 holds {int(planned * share):,}")
    ranks = ranks_of(alone)
    for one in ranks:
        one["engine"]["kv_blocks"] = planned // 128
    found = compare(alone, ranks)
    assert found.problems == ()
    assert found.lines[-1].held == (planned, planned)
    shared = replace(compare(spec, ranks), problems=())
    assert "kv.tokens_logical" not in {x.key for x in shared.lines}


def test_the_case_says_it_all(spec):
    result = EngineResult(spec, 1.0, ranks_of(spec))
    (case,) = judge_memory(ONE, result)
    assert case.name == f"{ONE.name}: memory against plan"
    assert (case.ok, case.error, case.limit) == (True, 0, 0.02)
    said = {x["key"]: x for x in json.loads(json.dumps(case.as_json()))["lines"]}
    assert said["slab"] == {
        **{"key": "slab", "name": "trtllm-gen softmax-statistics slab", "planned": 537919488},
        **{"held": [537919488, 537919488], "judged": "bytes", "not_read": ""},
    }
    result.ranks[0]["held"]["lines"]["slab"] -= 8
    (case,) = judge_memory(ONE, result)
    assert (case.ok, case.error, case.limit) == (False, 8, 0)
    assert judge_memory(ONE, EngineResult(spec, 1.0, failure="it broke")) == []


def test_the_summary_names_what_was_compared(spec):
    text = summary(compare(spec, ranks_of(spec)).lines)
    assert text.startswith("compared to the byte: ")
    named = set(text.partition(": ")[2].partition(";")[0].split(", "))
    assert named == HELD
    assert text.endswith("; 12 lines together are 0.00% apart.")
