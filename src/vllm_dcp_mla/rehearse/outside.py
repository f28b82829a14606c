"""The HF reference in a process of its own, so that its memory is free again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

import numpy as np

from .checkpoint import RehearsalModel
from .hf_reference import ANSWER
from .placement import visible
from .workload import Prompt, scored_tokens

#: Its attention is dense, and its scores are whole matrices.
LONGEST_PROMPT = 4096
_SECONDS = 300


class NoReferenceError(RuntimeError):
    """HF is no reference here; the message says why."""


def chosen(prompts: Sequence[Prompt]) -> list[int]:
    """The prompts, by number, that HF is asked about."""
    return [i for i, prompt in enumerate(prompts) if len(prompt.tokens) <= LONGEST_PROMPT]


def first_scores(model: RehearsalModel, prompts: Sequence[Prompt]) -> np.ndarray:
    """HF's float32 log-probabilities behind the :func:`chosen` prompts: ``[N, scored tokens]``.

    Args:
        model: the checkpoint.
        prompts: of the rehearsal.

    Raises:
        NoReferenceError: the model is another function there, or HF did not answer.
    """
    asked = [list(prompts[i].tokens) for i in chosen(prompts)]
    scored = scored_tokens(model.vocab_size)
    request = {
        "folder": str(model.folder),
        "prompts": asked,
        "token_ids": [scored] * len(asked),
        "device": "cuda",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", f"{__package__}.hf_reference"],
            input=json.dumps(request),
            env={**os.environ, **visible((0,))},
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoReferenceError(f"HF did not answer within {_SECONDS} s.") from None
    answers = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    if done.returncode or not answers:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise NoReferenceError(f"HF gave no reference: {said}")
    return np.asarray(json.loads(answers[-1].removeprefix(ANSWER)))
