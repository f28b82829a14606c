"""How a rehearsal is run; without what it takes to run one."""

from __future__ import annotations

from dataclasses import dataclass

from .config import Scores
from .faults import Fault


@dataclass(frozen=True, slots=True)
class Options:
    """How a rehearsal is run.

    Attributes:
        index_topk: of the small models, None for the released ones'.
        max_num_batched_tokens: most tokens of a step.
        ranks_per_gpu: None for the smallest number that works.
        engine_seconds: after which an engine is given up.
        fault: planted into every engine under DCP, which then runs alone; None for none.
        soak_seconds: of a soak in place of the comparison; None for none.
        scores: how the small models' scores are distributed over keys.
        long_tokens: of prompts beside the classes of length; 0 for none.
    """

    index_topk: int | None
    max_num_batched_tokens: int
    ranks_per_gpu: int | None
    engine_seconds: float
    fault: Fault | None = None
    soak_seconds: float | None = None
    scores: Scores = "normal"
    long_tokens: int = 0
