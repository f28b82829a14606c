import pytest
from bench_stand_ins import Clock

from vllm_dcp_mla.bench.timing import (
    HostStopwatch,
    Timing,
    compare,
    number_of_passes,
    number_of_sets,
    summarise,
)


class Named:
    def __init__(self, name):
        self.name, self.calls = name, 0

    def __call__(self):
        self.calls += 1


def test_versions_are_timed_in_turns_and_the_rounds_bound_the_noise():
    # The first time is the estimate; then three passes in each of two rounds.
    clock = Clock({"a": [10, 8, 10, 99, 12, 11, 12], "b": [10, 40, 40, 40, 44, 44, 44]})
    works = {n: Named(n) for n in "ab"}
    found = compare(works, clock, launches=2, budget_us=60)
    assert found == {"a": Timing(5.5, pytest.approx(0.2)), "b": Timing(21, pytest.approx(0.1))}
    assert "".join(clock.turns) == "ab" + "aaabbb" * 2


def test_a_slow_start_does_not_move_a_median():
    assert compare({"a": Named("a")}, Clock({"a": [5, 500, 5, 5, 5, 5, 5]}), budget_us=30)[
        "a"
    ] == Timing(5, 0)


def test_every_pass_runs_the_work_after_it_warmed_up():
    work = Named("a")
    assert HostStopwatch().prepare(work)() >= 0
    assert work.calls == 2


def test_a_version_that_refuses_does_not_stop_the_others():
    class Refusing(Clock):
        def prepare(self, work):
            if work.name == "a":
                raise RuntimeError("cannot be captured")
            return super().prepare(work)

    seen = []
    works = {n: Named(n) for n in "ab"}
    found = compare(
        works,
        Refusing(),
        refusals=(RuntimeError,),
        refused=lambda name, error: seen.append((name, str(error))),
    )
    assert list(found) == ["b"]
    assert seen == [("a", "cannot be captured")]
    with pytest.raises(RuntimeError, match="captured"):
        compare(works, Refusing())


@pytest.mark.parametrize(
    ("pass_us", "budget_us", "passes"),
    [(10, 200, 20), (1000, 10, 3), (0.1, 1e6, 50), (0, 1e6, 50)],
)
def test_passes_follow_the_budget_within_bounds(pass_us, budget_us, passes):
    assert number_of_passes(pass_us, budget_us) == passes


def test_two_rounds_say_how_far_apart_they_are():
    assert summarise([10.0, 12.5], 1) == Timing(11.25, 0.25)
    assert summarise([0.0, 0.0], 1) == Timing(0, 0)


@pytest.mark.parametrize(
    ("set_bytes", "sets"), [(60 << 20, 4), (1 << 20, 240), (1, 256), (1 << 40, 2), (0, 256)]
)
def test_sets_are_larger_together_than_the_l2(set_bytes, sets):
    assert number_of_sets(set_bytes, 60 << 20) == sets


def test_the_hosts_clock_waits_before_it_starts(monkeypatch):
    from vllm_dcp_mla.bench import timing

    now, order = [0], []
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: now[0])

    def wait():
        order.append("wait")
        now[0] += 9_000_000

    def work():
        order.append("work")
        now[0] += 7000

    once = HostStopwatch(wait).prepare(work)
    assert once() == 7
    assert order == ["work", "wait", "work"]
