"""An engine under arrivals, aborts and preemptions for minutes, all by step number from one seed.

First every prompt is served alone; then rounds of the same prompts come, go and crowd each other
out. What a request answers must not depend on that, nor may memory grow or a buffer move.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .drift import distance
from .requests import Requests, Soak
from .serve import sampling, scores_of, serve

#: Tokens generated for each request, enough to outgrow a block while it runs.
GENERATED_TOKENS = 64
#: Prompts of each length class.
PROMPTS_PER_CLASS = 8
#: The KV cache holds this many of the longest request; more run at a time.
LONGEST_REQUESTS = 2
_ARRIVALS = 48  # of a round
_STEPS_BETWEEN = 6  # arrivals, on average
_ABORTED = 0.2
_ABORT_STEPS = 40  # after arrival, at most


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a round.

    Attributes:
        step: at which it comes.
        prompt: its number.
        abort_step: at which it is taken back; None for never.
    """

    step: int
    prompt: int
    abort_step: int | None


def round_of(number: int, prompts: int, seed: int) -> list[Arrival]:
    """The arrivals of a round in order, the same on every rank.

    Args:
        number: of the round.
        prompts: how many there are to draw from.
        seed: of the soak.
    """
    rng = random.Random(f"{seed} {number}")
    arrivals, step = [], 0
    for _ in range(_ARRIVALS):
        step += rng.randrange(2 * _STEPS_BETWEEN)
        abort = step + rng.randint(1, _ABORT_STEPS) if rng.random() < _ABORTED else None
        arrivals.append(Arrival(step, rng.randrange(prompts), abort))
    return arrivals


def run(
    engine: Any,
    requests: Requests,
    soak: Soak,
    state: Callable[[], dict[str, Any]],
    agree: Callable[[bool], bool],
    event: Callable[..., None],
) -> dict[str, Any]:
    """Soaks an engine; what came of it.

    Args:
        engine: vLLM's ``LLMEngine``.
        requests: the prompts.
        soak: how long.
        state: this rank's memory and buffers.
        agree: whether all ranks say yes; a collective.
        event: called with what is going on.
    """
    alone = []
    for index in range(len(requests.prompts)):
        one = requests.model_copy(update={"prompts": [requests.prompts[index]], "wave": [0]})
        ((_, scores),) = serve(engine, one)
        alone.append(np.asarray(scores))
        event("alone", done=index + 1, of=len(requests.prompts))
    deadline = time.monotonic() + soak.seconds
    distances: list[tuple[int, float]] = []
    states, aborted, steps = [state()], 0, 0
    while agree(time.monotonic() < deadline):
        arrivals = round_of(len(states), len(requests.prompts), soak.seed)
        done = _run_round(engine, requests, arrivals)
        distances += [(index, distance(np.asarray(s), alone[index])) for index, s in done.served]
        aborted += done.aborted
        steps += done.steps
        states.append(state())
        event("soaked", rounds=len(states) - 1, requests=len(distances), steps=steps)
    return {
        "distances": distances,
        "aborted": aborted,
        "steps": steps,
        "states": states,
    }


@dataclass(slots=True)
class _Round:
    """What came of a round: prompts served to their end with their scores, and two counts."""

    served: list[tuple[int, list[list[float]]]] = field(default_factory=list)
    aborted: int = 0
    steps: int = 0


def _run_round(engine: Any, requests: Requests, arrivals: list[Arrival]) -> _Round:
    waiting = list(enumerate(arrivals))
    leaving: dict[str, int] = {}
    done, step = _Round(), 0
    while waiting or engine.has_unfinished_requests():
        if not engine.has_unfinished_requests():
            step = max(step, waiting[0][1].step)  # nothing runs before the next one comes
        while waiting and waiting[0][1].step <= step:
            number, arrival = waiting.pop(0)
            prompt = {"prompt_token_ids": list(requests.prompts[arrival.prompt])}
            engine.add_request(f"soak-{number}", prompt, sampling(requests))
            if arrival.abort_step is not None:
                leaving[f"soak-{number}"] = arrival.abort_step
        gone = [name for name, when in leaving.items() if when <= step]
        if gone:
            engine.abort_request(gone)
            done.aborted += len(gone)
            leaving = {name: when for name, when in leaving.items() if name not in gone}
        for output in engine.step():
            if output.finished and output.outputs[0].finish_reason == "length":
                leaving.pop(output.request_id, None)
                number = int(output.request_id.removeprefix("soak-"))
                done.served.append((arrivals[number].prompt, scores_of(output, requests)))
        step, done.steps = step + 1, done.steps + 1
    return done
