"""The requests as they travel to every rank of every engine."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from . import workload


class Requests(BaseModel):
    """What an engine serves.

    Attributes:
        prompts: tokens of each request.
        wave: of each request; the next one is sent once this one has been served.
        forced: the token generated at every position.
        generated: tokens generated for each request.
        scored: tokens whose log-probabilities are wanted at every position.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompts: list[list[int]]
    wave: list[int]
    forced: int
    generated: int
    scored: list[int]

    @classmethod
    def of(cls, prompts: list[workload.Prompt], vocab_size: int) -> Requests:
        """The rehearsal's prompts with its forced and scored tokens."""
        return cls(
            prompts=[list(prompt.tokens) for prompt in prompts],
            wave=[prompt.wave for prompt in prompts],
            forced=workload.FORCED_TOKEN,
            generated=workload.GENERATED_TOKENS,
            scored=workload.scored_tokens(vocab_size),
        )

    def waves(self) -> list[list[int]]:
        """Indices of the requests of each wave."""
        return [
            [index for index, wave in enumerate(self.wave) if wave == number]
            for number in sorted(set(self.wave))
        ]
