"""Requests through one engine of vLLM, inside a rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .requests import Requests


def serve(engine: Any, requests: Requests) -> Iterator[tuple[int, list[list[float]]]]:
    """Serves all requests wave by wave; yields each one's index and its log-probabilities.

    The log-probabilities are ``[positions][scored tokens]``, in nats.
    """
    for wave in requests.waves():
        for index in wave:
            prompt = {"prompt_token_ids": list(requests.prompts[index])}
            engine.add_request(str(index), prompt, sampling(requests))
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    yield int(output.request_id), scores_of(output, requests)


def sampling(requests: Requests) -> Any:
    """Greedy, with the token forced, and the log-probabilities of all tokens.

    Those of chosen tokens alone (``logprob_token_ids``) are not given for drafted tokens.
    """
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0,
        max_tokens=requests.generated,
        ignore_eos=True,
        detokenize=False,
        allowed_token_ids=[requests.forced],
        logprobs=-1,
    )


def scores_of(output: Any, requests: Requests) -> list[list[float]]:
    """The scored tokens' log-probabilities at every generated position.

    Raises:
        RuntimeError: another token than the forced one was generated.
    """
    (completion,) = output.outputs
    if list(completion.token_ids) != [requests.forced] * requests.generated:
        raise RuntimeError(
            f"request {output.request_id} generated {list(completion.token_ids)}; token "
            f"{requests.forced} was the only one allowed, {requests.generated} times"
        )
    return [[step[token].logprob for token in requests.scored] for step in completion.logprobs]
