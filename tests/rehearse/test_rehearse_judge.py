import json
from dataclasses import replace

import numpy as np
import pytest
from rehearse_results import BUFFERS, ONE, WORKSPACE, good_results, result, scores

from vllm_dcp_mla.rehearse.judge import _first_difference, judge
from vllm_dcp_mla.rehearse.schedule import EngineResult
from vllm_dcp_mla.rehearse.workload import Prompt

PROMPTS = [Prompt(f"to {10 * (i % 2 + 1)}", (1,), 0) for i in range(64)]
OURS, STOCK = "vllm_dcp_mla", "vllm"


@pytest.fixture
def results():
    return good_results()


def judged(results, configuration=ONE):
    cases = judge(configuration, results, PROMPTS)
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert case.ok == (not case.problems), case
        assert case.ok == (case.error <= case.limit), case
    return cases


def problems(results, configuration=ONE):
    return [problem for case in judged(results, configuration) for problem in case.problems]


def test_all_is_well(results):
    cases = judged(results)
    assert [case.name.removeprefix(ONE.name) for case in cases] == [
        ": runs",
        ": to 10 tokens",
        ": to 20 tokens",
    ]
    assert all(case.ok for case in cases)
    runs = cases[0]
    assert (runs.collectives, runs.syncs, runs.late_compiles, runs.seconds) == ((12, 12), 0, 0, 30)
    assert all(0.7 < case.drift.ratio < 1.4 and case.drift.prompts == 32 for case in cases[1:])


def test_a_late_compilation_of_ours_fails_and_one_of_stocks_does_not(results):
    results[ONE.name].ranks[1]["late_compiles"] = [[STOCK, "k0 (Triton, x)"]]
    assert problems(results) == []
    results[ONE.name].ranks[1]["late_compiles"] += [[OURS, "k1 (Triton, y)"], [OURS, "k2"]]
    runs = judged(results)[0]
    assert (runs.ok, runs.late_compiles, runs.error) == (False, 2, 2)
    assert runs.problems == (
        "rank 1: k1 (Triton, y) was compiled late.",
        "rank 1: k2 was compiled late.",
    )


def test_a_wait_of_ours_fails_and_one_of_stocks_does_not(results):
    results[ONE.name].ranks[0]["syncs"] = [[STOCK, "vllm.x:3"], ["other", "?"]]
    assert problems(results) == []
    results[ONE.name].ranks[0]["syncs"] += [[OURS, "vllm_dcp_mla.indexer:7"]]
    runs = judged(results)[0]
    assert (runs.ok, runs.syncs) == (False, 1)
    assert runs.problems == ("rank 0: vllm_dcp_mla.indexer:7 waited for the GPU.",)


def test_collectives_in_another_order_fail(results):
    results[ONE.name].ranks[1]["collectives"][3][0] = "broadcast"
    (problem,) = problems(results)
    assert problem == (
        "the collectives of ranks 0 and 1 differ from number 4 of theirs on: "
        "rank 0 all_gather dcp:0 3; rank 1 broadcast."
    )


def test_a_rank_that_calls_fewer_collectives_fails(results):
    del results[ONE.name].ranks[0]["collectives"][-1]
    (problem,) = problems(results)
    assert problem.endswith(
        "number 12 of theirs on: rank 0 nothing more; rank 1 all_gather dcp:0 11."
    )


def calls_of(*rows):
    """Of 4 ranks, TP2 PCP2 DCP4: the query's gather has the rows of the PCP rank."""
    return [
        [
            ["all_reduce tp:0 (8,)", pair],
            [f"all_gather tp:0 ({rows[rank]},)", pair],
            ["all_gather dcp:0 (4,)", [0, 1, 2, 3]],
        ]
        for rank, pair in enumerate(([0, 1], [0, 1], [2, 3], [2, 3]))
    ]


def test_groups_of_one_name_may_differ_where_no_rank_is_in_both():
    assert _first_difference(calls_of(5, 5, 3, 3)) is None
    difference = _first_difference(calls_of(5, 5, 3, 5))
    assert difference is not None
    assert "ranks 2 and 3 differ from number 2 of theirs on: rank 2 all_gather tp:0 (3,)" in (
        difference
    )


def test_the_order_of_two_groups_counts_where_ranks_are_in_both():
    calls = calls_of(5, 5, 3, 3)
    calls[1][1:] = calls[1][:0:-1]
    assert "ranks 0 and 1 differ from number 2" in str(_first_difference(calls))


@pytest.mark.parametrize("mode", ["warn", None])
@pytest.mark.parametrize(
    ("key", "name"), [("jit_monitor", "JIT monitor"), ("sync_check", "sync check")]
)
def test_a_monitor_that_was_not_on_fails(results, key, name, mode):
    results[ONE.name].ranks[1]["engine"][key] = mode
    assert problems(results) == [f"rank 1: vLLM's {name} was {mode}, not on."]


def test_a_baseline_need_not_raise(results):
    assert problems(results) == []
    base = results[ONE.baseline(1).name]
    assert base.ranks[0]["engine"]["jit_monitor"] == "warn"
    assert base.ranks[0]["engine"]["sync_check"] is None


@pytest.mark.parametrize("change", [[["workspace", 4097, WORKSPACE], BUFFERS[1]], []])
def test_buffers_that_moved_fail(results, change):
    results[ONE.name].ranks[0]["before"]["buffers"] = change
    (problem,) = problems(results)
    assert problem.startswith(
        f"rank 0: buffers moved from {change} to [['workspace', 4096, {WORKSPACE}]"
    )


@pytest.mark.parametrize("accepted", [0, 10])
def test_drafts_must_be_both_accepted_and_rejected(results, accepted):
    mtp = replace(ONE, mtp=1)
    results[mtp.name] = result(mtp, scores(0.01, 1))
    assert problems(results, mtp) == []
    for one in results[mtp.name].ranks:
        one["metrics"]["accepted"] = accepted
    assert problems(results, mtp) == [
        f"{accepted} of 10 drafted tokens were accepted; both kinds must occur."
    ]


def test_a_class_of_stocks_where_ours_is_to_serve_fails(results):
    ours = replace(ONE, ours=True)
    assert problems(results, ours) == []
    results[ONE.name].ranks[1]["engine"]["impls"] = ["vllm.v1.x.FlashMLASparseImpl"]
    assert problems(results) == []
    assert problems(results, ours) == [
        "rank 1: vllm.v1.x.FlashMLASparseImpl served, which is not this package's."
    ]


def test_a_kernel_that_needs_no_workspace_has_no_such_case(results):
    for one in results[ONE.name].ranks:
        one["before"]["buffers"] = one["after"]["buffers"] = []
    assert [case.name for case in judged(results) if "workspace" in case.name] == []
    assert problems(results) == []


def test_a_drift_of_twice_the_noise_fails_in_its_class_alone(results):
    far = np.array(scores(0.01, 1))
    far[1::2] = np.array(scores(0.02, 1))[1::2]
    for one in results[ONE.name].ranks:
        one["scores"] = far.tolist()
    good, bad = judged(results)[1:]
    assert good.ok
    assert not bad.ok
    assert bad.name.endswith("to 20 tokens")
    assert bad.error == bad.drift.high > bad.limit == 1.5
    assert "times as far from TP1's as TP2's are (95 % interval " in bad.problems[0]


@pytest.mark.parametrize("who", [ONE, ONE.baseline(1), ONE.baseline(2)])
@pytest.mark.parametrize(
    ("value", "said"),
    [(float("nan"), "a log-probability is not finite"), (None, "(1, 3) log-probabilities")],
)
def test_what_is_no_number_or_too_short_is_a_failed_case(results, who, value, said):
    given_scores = results[who.name].ranks[0]["scores"]
    if value is None:
        del given_scores[5][1]
    else:
        given_scores[5][0][0] = value
    good, bad = judged(results)[1:]
    assert good.ok
    (problem,) = bad.problems
    assert problem.startswith("not comparable with TP1: prompt 5: ")
    if who is ONE:
        assert said in problem


def test_a_failed_engine_says_why_and_nothing_else(results):
    results[ONE.name] = EngineResult(results[ONE.name].spec, 5.0, failure="it broke")
    (case,) = judged(results)
    assert (case.name, case.problems, case.seconds) == (f"{ONE.name}: runs", ("it broke",), 5.0)


def test_a_failed_baseline_is_named_once(results):
    base = ONE.baseline(2)
    results[base.name] = EngineResult(results[base.name].spec, 5.0, failure="it broke")
    assert [(c.name, c.ok) for c in judged(results)] == [
        (f"{ONE.name}: runs", True),
        (f"{base.name}: runs", False),
    ]


def test_json_has_the_fixed_keys_and_no_infinity(results):
    for one in results[ONE.baseline(2).name].ranks:
        one["scores"] = scores(0, 0)  # no noise at all
    cases = judged(results)
    assert [case.ok for case in cases] == [True, False, False]
    for case in cases:
        text = json.dumps(case.as_json(), allow_nan=False)
        assert set(json.loads(text)) >= {
            *("name", "ok", "error", "limit"),
            *("collectives", "syncs", "late_compiles", "seconds"),
        }
    assert cases[1].error == float("inf")
    assert cases[1].as_json()["error"] is None
    assert cases[1].as_json()["drift"]["ratio"] is None
