"""The requests as they travel to every rank of every engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from . import workload

#: Queries of a prompt whose selection is kept, spread over those for which the indexer chooses;
#: also the prompt's last, and that of a decode step.
SPREAD_QUERIES = 4
_DECODED = 3
#: Prompts of each length class of which hidden states are kept.
WHOLE_PER_CLASS = 4


class Soak(BaseModel):
    """A soak of so many seconds, from a seed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: float
    seed: int = 0


class Recording(BaseModel):
    """What of the indexers is kept; see :mod:`.record`.

    Attributes:
        positions: of each prompt, the queries whose selection is kept.
        whole: prompts of which hidden states are kept too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    positions: list[list[int]]
    whole: list[int] = []

    @classmethod
    def of(cls, prompts: Sequence[workload.Prompt], index_topk: int) -> Recording:
        """The same queries of the same prompts in every engine.

        Whole prompts are of the first wave: what is cached is not computed.

        Args:
            prompts: of the rehearsal.
            index_topk: keys of a query.
        """
        positions, whole = [], []
        taken: Counter[str] = Counter()
        for number, prompt in enumerate(prompts):
            length = len(prompt.tokens)
            chosen = {length - 1, length + _DECODED}
            if (room := length - index_topk) > 0:
                parts = range(SPREAD_QUERIES)
                chosen |= {index_topk + room * part // SPREAD_QUERIES for part in parts}
            positions.append(sorted(chosen))
            if prompt.wave == 0 and taken[prompt.length_class] < WHOLE_PER_CLASS:
                taken[prompt.length_class] += 1
                whole.append(number)
        return cls(positions=positions, whole=whole)


class Requests(BaseModel):
    """What an engine serves.

    Attributes:
        prompts: tokens of each request.
        wave: of each request; the next one is sent once this one has been served.
        forced: the token generated at every position.
        generated: tokens generated for each request.
        scored: tokens whose log-probabilities are wanted at every position.
        soak: serve them again and again instead; see :mod:`.soak`.
        recording: what of the indexers is kept; None for nothing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompts: list[list[int]]
    wave: list[int]
    forced: int
    generated: int
    scored: list[int]
    soak: Soak | None = None
    recording: Recording | None = None

    @classmethod
    def of(
        cls,
        prompts: list[workload.Prompt],
        vocab_size: int,
        generated: int = workload.GENERATED_TOKENS,
    ) -> Requests:
        """Prompts with the rehearsal's forced and scored tokens."""
        return cls(
            prompts=[list(prompt.tokens) for prompt in prompts],
            wave=[prompt.wave for prompt in prompts],
            forced=workload.FORCED_TOKEN,
            generated=generated,
            scored=workload.scored_tokens(vocab_size),
        )

    def waves(self) -> list[list[int]]:
        """Indices of the requests of each wave."""
        return [
            [index for index, wave in enumerate(self.wave) if wave == number]
            for number in sorted(set(self.wave))
        ]
