"""The requests as they travel to every rank of every engine."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from . import workload


class Soak(BaseModel):
    """A soak of so many seconds, from a seed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: float
    seed: int = 0


class Requests(BaseModel):
    """What an engine serves.

    Attributes:
        prompts: tokens of each request.
        wave: of each request; the next one is sent once this one has been served.
        forced: the token generated at every position.
        generated: tokens generated for each request.
        scored: tokens whose log-probabilities are wanted at every position.
        soak: serve them again and again instead; see :mod:`.soak`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompts: list[list[int]]
    wave: list[int]
    forced: int
    generated: int
    scored: list[int]
    soak: Soak | None = None

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
