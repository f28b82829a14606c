import pytest
from rehearse_results import ONE, WORKSPACE, good_results, states

from vllm_dcp_mla.rehearse.schedule import EngineResult
from vllm_dcp_mla.rehearse.soak_judge import judge_soak


@pytest.fixture
def soaked():
    results = good_results()
    for one in results[ONE.name].ranks:
        distances = [[i, 0.005] for i in range(8)] * 3
        one["soak"] = {
            "distances": distances,
            "aborted": 4,
            "steps": 99,
            "states": states(0, 5, 7, 7, 7),
        }
        del one["scores"]
    return results


def soak_cases(soaked):
    cases = judge_soak(ONE, soaked)
    for case in cases:
        assert case.ok == (not case.problems), case
    return cases


def soak_problems(soaked):
    return [problem for case in soak_cases(soaked) for problem in case.problems]


def test_a_good_soak(soaked):
    cases = soak_cases(soaked)
    assert all(case.ok for case in cases)
    assert cases[2].name == f"{ONE.name}: 24 requests in 99 steps, 3 preempted, 4 aborted"
    assert cases[2].drift.prompts == 8


@pytest.mark.parametrize(
    ("held", "ranks", "what"),
    [
        ("allocated_bytes", "1", "what tensors hold"),
        ("device_bytes", "01", "memory outside of torch"),
    ],
)
def test_memory_that_is_held_more_of_in_the_second_half_fails(soaked, held, ranks, what):
    for number in map(int, ranks):
        seen = soaked[ONE.name].ranks[number]["soak"]["states"]
        for state in seen[-2:]:
            state[held] += 1
    assert soak_problems(soaked) == [
        f"rank {n}: {what} grew by 1 bytes in the second half, of which 0 are accepted."
        for n in ranks
    ]


@pytest.mark.parametrize("held", ["allocated_bytes", "device_bytes"])
def test_memory_that_comes_and_goes_is_no_growth(soaked, held):
    for one in soaked[ONE.name].ranks:
        one["soak"]["states"][-1][held] += 1
    assert not soak_problems(soaked)


@pytest.mark.parametrize(("segments", "good"), [(1, True), (2, False)])
def test_torch_may_keep_one_segment_more(soaked, segments, good):
    size = segments * (20 << 20)
    for one in soaked[ONE.name].ranks:
        one["soak"]["states"][-1]["reserved_bytes"] += size
        one["soak"]["states"][-1]["device_bytes"] += 2 * size  # both ranks' are on one GPU
    expected = f"what torch keeps grew by {size:,} bytes in the second half"
    assert all(expected in problem for problem in soak_problems(soaked))
    assert (not soak_problems(soaked)) == good


def test_ranks_on_gpus_of_their_own_are_looked_at_alone(soaked):
    for number, one in enumerate(soaked[ONE.name].ranks):
        for state in one["soak"]["states"]:
            state["gpu"] = str(number)
        last = one["soak"]["states"][-1]
        last["reserved_bytes"] += 1
        last["device_bytes"] += 1
    assert not soak_problems(soaked)


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_a_soak_too_short_to_show_growth_fails(soaked, rounds):
    for one in soaked[ONE.name].ranks:
        one["soak"]["states"] = one["soak"]["states"][-rounds - 1 :]
    assert soak_problems(soaked) == [
        f"{rounds} of the 4 rounds that show growth were served; soak for longer."
    ]


def test_a_buffer_that_moved_in_between_fails(soaked):
    soaked[ONE.name].ranks[0]["soak"]["states"][2]["buffers"] = [["workspace", 4097, WORKSPACE]]
    assert soak_problems(soaked) == ["rank 0: buffers moved."]


def test_no_preemption_no_abort_and_no_answer_fail(soaked):
    for one in soaked[ONE.name].ranks:
        one["metrics"]["preemptions"] = 0
        one["soak"] |= {"aborted": 0, "distances": []}
    assert soak_problems(soaked) == [
        "no request was served to its end; the soak must see some.",
        "no request was preempted; the soak must see some.",
        "no request was aborted; the soak must see some.",
    ]


def test_answers_that_depend_on_the_company_fail(soaked):
    for one in soaked[ONE.name].ranks:
        one["soak"]["distances"] = [[i, 0.03] for i in range(8)]
    (problem,) = soak_problems(soaked)
    assert problem.startswith("in company, log-probabilities are ")


def test_a_soak_whose_baseline_is_no_number_fails(soaked):
    soaked[ONE.baseline(2).name].ranks[0]["scores"][3][0][0] = float("nan")
    (problem,) = soak_problems(soaked)
    assert problem == ("TP2 is not comparable with TP1: prompt 3: a log-probability is not finite.")


def test_failed_engines_of_a_soak_are_named(soaked):
    for name in (ONE.name, ONE.baseline(1).name):
        soaked[name] = EngineResult(soaked[name].spec, 5.0, failure="it broke")
    assert [case.name for case in judge_soak(ONE, soaked)] == [
        f"{ONE.name}: runs",
        f"{ONE.baseline(1).name}: runs",
    ]
