"""What every engine of a rehearsal serves: the same prompts, with the same continuations.

One token is forced at every step, so that all engines see the same context at every position and
their log-probabilities can be compared there, whatever a flat random model would have chosen.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

#: Prompts in each class of length.
PROMPTS_PER_CLASS = 32
#: Tokens generated after each prompt: the first from a prefill, the others from decode steps.
GENERATED_TOKENS = 8
#: Tokens whose log-probability is compared at every position.
SCORED_TOKENS = 64
#: Prompts of the length that a user asks for, beside the classes.
LONG_PROMPTS = 2
#: Of vLLM's cache on a rank.
CACHE_BLOCK_TOKENS = 64
#: Where a prompt repeats the start of an earlier one: vLLM caches whole blocks of 64 tokens.
_SHARED_PART = 0.75
#: Generated at every step. The checkpoint's MTP layer drafts it too, always: whether a draft is
#: accepted or rejected, the tokens are the same, and comparable with an engine without MTP.
FORCED_TOKEN = 0


@dataclass(frozen=True, slots=True)
class LengthClass:
    """Prompts of ``shortest`` to ``longest`` tokens."""

    name: str
    shortest: int
    longest: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request.

    Attributes:
        length_class: name of its :class:`LengthClass`.
        tokens: the prompt.
        wave: 0; 1 for a prompt that is sent once its first blocks are cached; 2 for a long one.
    """

    length_class: str
    tokens: tuple[int, ...]
    wave: int


def length_classes(index_topk: int) -> tuple[LengthClass, ...]:
    """Below ``index_topk`` every token is selected; above, the indexer chooses.

    Args:
        index_topk: tokens that the indexer selects for a query.
    """
    return (
        LengthClass(f"to {index_topk}", 1, index_topk),
        LengthClass(f"to {3 * index_topk}", index_topk + 1, 3 * index_topk),
        LengthClass(f"to {6 * index_topk}", 3 * index_topk + 1, 6 * index_topk),
    )


def max_model_len(index_topk: int, long_tokens: int = 0) -> int:
    """Tokens of the longest request, prompt and generated ones, in whole blocks of 64.

    Args:
        index_topk: as in :func:`length_classes`.
        long_tokens: of the prompts beside the classes; 0 for none.
    """
    longest = max(6 * index_topk, long_tokens) + GENERATED_TOKENS
    return -(-longest // CACHE_BLOCK_TOKENS) * CACHE_BLOCK_TOKENS


def prompts(
    index_topk: int,
    vocab_size: int,
    ranks: int,
    *,
    per_class: int = PROMPTS_PER_CLASS,
    long_tokens: int = 0,
    seed: int = 0,
) -> list[Prompt]:
    """The requests of a rehearsal, in the order in which they are sent.

    The first class holds prompts of one token, of fewer tokens than ranks, and of ``index_topk``.
    A quarter of each class comes in a second wave and repeats the start of a prompt of the first.

    Args:
        index_topk: as in :func:`length_classes`.
        vocab_size: tokens are drawn from ``[1, vocab_size)``.
        ranks: ranks that share a cache.
        per_class: prompts of a class, at least 8.
        long_tokens: of :data:`LONG_PROMPTS` more, which come when all others are done; 0 for none.
        seed: of the draw.
    """
    if per_class < 8:
        raise ValueError(f"per_class is {per_class}; a class needs 8 prompts or more")
    rng = random.Random(seed)
    made: list[Prompt] = []
    for band in length_classes(index_topk):
        special = [1, max(ranks - 1, 1), index_topk] if band.shortest == 1 else [band.longest]
        repeats = per_class // 4
        drawn = [rng.randint(band.shortest, band.longest) for _ in range(per_class - len(special))]
        lengths = special + drawn
        first = [_draw(rng, length, vocab_size) for length in lengths[: per_class - repeats]]
        made += [Prompt(band.name, tokens, 0) for tokens in first]
        for length in lengths[per_class - repeats :]:
            start = max(first, key=len)[: int(length * _SHARED_PART)]
            tokens = start + _draw(rng, length - len(start), vocab_size)
            made.append(Prompt(band.name, tokens, 1))
    rng.shuffle(made)  # short and long ones meet in one batch
    if long_tokens:
        name = f"of {long_tokens}"
        made += [Prompt(name, _draw(rng, long_tokens, vocab_size), 2) for _ in range(LONG_PROMPTS)]
    return sorted(made, key=lambda prompt: prompt.wave)


def scored_tokens(vocab_size: int, seed: int = 0) -> list[int]:
    """The tokens whose log-probabilities are compared, in ascending order."""
    return sorted(random.Random(seed).sample(range(vocab_size), SCORED_TOKENS))


def _draw(rng: random.Random, length: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1, vocab_size) for _ in range(length))
