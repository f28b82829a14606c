from types import SimpleNamespace

import pytest

from vllm_dcp_mla.rehearse import serve as serve_module
from vllm_dcp_mla.rehearse import soak
from vllm_dcp_mla.rehearse.requests import Requests, Soak
from vllm_dcp_mla.rehearse.serve import serve

REQUESTS = Requests(
    prompts=[[i + 1] * (i + 1) for i in range(6)],
    wave=[0, 0, 0, 0, 1, 1],
    forced=0,
    generated=16,
    scored=[3, 5],
)


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch):
    for module in (soak, serve_module):
        monkeypatch.setattr(module, "sampling", lambda requests: requests.generated)


class FakeEngine:
    """One token a step for each of up to three requests; what it says may depend on company."""

    def __init__(self, company=0.0, early=False):
        self.running, self.waiting, self.company = {}, [], company
        self.steps, self.idle_steps, self.aborted, self.most = 0, 0, [], 0
        self.unknown_aborts, self.early = [], early

    def add_request(self, name, prompt, tokens):
        assert name not in self.running
        assert name not in [waiting[0] for waiting in self.waiting]
        self.waiting.append((name, prompt["prompt_token_ids"], tokens))

    def has_unfinished_requests(self):
        return bool(self.running or self.waiting)

    def abort_request(self, names):
        for name in names:
            if name not in self.running and name not in [w[0] for w in self.waiting]:
                self.unknown_aborts.append(name)
            self.running.pop(name, None)
            self.waiting = [w for w in self.waiting if w[0] != name]
            self.aborted.append(name)

    def step(self):
        self.steps += 1
        self.idle_steps += not self.has_unfinished_requests()
        while self.waiting and len(self.running) < 3:
            name, prompt, tokens = self.waiting.pop(0)
            self.running[name] = (prompt, tokens, [])
        self.most = max(self.most, len(self.running))
        finished = []
        for name, (prompt, tokens, said) in list(self.running.items()):
            value = -float(prompt[0]) - self.company * (len(self.running) - 1)
            said.append({token: SimpleNamespace(logprob=value) for token in REQUESTS.scored})
            if len(said) == tokens:
                del self.running[name]
                completion = SimpleNamespace(
                    token_ids=[0] * tokens, logprobs=said, finish_reason="length"
                )
                finished.append(
                    SimpleNamespace(request_id=name, finished=True, outputs=[completion])
                )
        return finished


def run(engine, rounds=2, seed=0):
    asked = iter([True] * rounds + [False])
    events, states = [], iter(range(100))
    found = soak.run(
        engine,
        REQUESTS,
        Soak(seconds=0, seed=seed),
        lambda: {"state": next(states)},
        lambda yes: next(asked),
        lambda name, **values: events.append((name, values)),
    )
    return found, events


def test_a_round_is_the_same_for_a_seed_and_differs_between_rounds():
    assert soak.round_of(3, 24, 7) == soak.round_of(3, 24, 7)
    assert soak.round_of(3, 24, 7) != soak.round_of(4, 24, 7)
    assert soak.round_of(3, 24, 7) != soak.round_of(3, 24, 8)


def test_a_round_has_arrivals_in_order_and_aborts_after_them():
    arrivals = soak.round_of(1, 24, 0)
    assert [a.step for a in arrivals] == sorted(a.step for a in arrivals)
    assert {a.prompt for a in arrivals} <= set(range(24))
    aborted = [a for a in arrivals if a.abort_step is not None]
    assert 2 <= len(aborted) < len(arrivals) / 2
    assert all(a.step < a.abort_step <= a.step + soak._ABORT_STEPS for a in aborted)


def test_a_soak_counts_what_it_did():
    engine = FakeEngine()
    found, events = run(engine)
    assert engine.most == 3, "more requests than fit at once"
    assert found["aborted"] == len(engine.aborted) > 0
    assert engine.unknown_aborts == [], "a request that has ended is not taken back"
    assert len(found["distances"]) + found["aborted"] == 2 * soak._ARRIVALS
    assert found["steps"] == engine.steps - len(REQUESTS.prompts) * REQUESTS.generated
    assert [s["state"] for s in found["states"]] == [0, 1, 2]
    assert [e for e in events if e[0] == "alone"][-1][1] == {"done": 6, "of": 6}
    assert [values["rounds"] for name, values in events if name == "soaked"] == [1, 2]


def test_answers_that_do_not_depend_on_company_are_no_distance_away():
    found, _ = run(FakeEngine())
    assert {d for _, d in found["distances"]} == {0.0}
    assert {index for index, _ in found["distances"]} == set(range(6))


def test_answers_that_depend_on_company_are_found():
    found, _ = run(FakeEngine(company=0.25))
    distances = [d for _, d in found["distances"]]
    assert max(distances) > 0.4, "two others ran"
    assert min(distances) >= 0


def test_steps_in_which_nothing_would_run_are_skipped(monkeypatch):
    arrivals = [soak.Arrival(0, 0, None), soak.Arrival(5_000_000, 1, None)]
    monkeypatch.setattr(soak, "round_of", lambda *args: arrivals)
    engine = FakeEngine()
    found, _ = run(engine, rounds=1)
    assert found["steps"] == 2 * REQUESTS.generated
    assert engine.idle_steps == 0


def test_two_ranks_take_the_same_steps():
    runs = []
    for _ in range(2):
        engine = FakeEngine()
        found, _ = run(engine, rounds=3, seed=5)
        runs.append((engine.steps, engine.aborted, found))
    assert runs[0] == runs[1]


def test_a_soak_without_a_round_has_only_its_first_state():
    found, _ = run(FakeEngine(), rounds=0)
    assert (found["distances"], len(found["states"]), found["steps"]) == ([], 1, 0)


def test_a_wave_waits_for_the_one_before():
    engine = FakeEngine()
    order = [index for index, _ in serve(engine, REQUESTS)]
    assert sorted(order) == list(range(6))
    assert set(order[-2:]) == {4, 5}
    assert engine.idle_steps == 0


def test_scores_are_by_position_and_token():
    scores = dict(serve(FakeEngine(), REQUESTS))
    assert scores[2] == [[-3.0, -3.0]] * REQUESTS.generated


@pytest.mark.parametrize("tokens", [[0] * 15 + [1], [0] * 15, [0] * 17])
def test_another_token_than_the_forced_one_is_an_error(tokens):
    completion = SimpleNamespace(token_ids=tokens, logprobs=[])
    with pytest.raises(RuntimeError, match=r"request 7 generated .* only one allowed, 16 times"):
        serve_module.scores_of(SimpleNamespace(request_id="7", outputs=[completion]), REQUESTS)
