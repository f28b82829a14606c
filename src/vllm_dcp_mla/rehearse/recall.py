"""Which share of the right keys an engine's indexers selected, for each length class.

Needs no torch until there is something to compare.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .checkpoint import RehearsalModel
from .schedule import EngineResult
from .workload import Prompt

#: Prompt, layer, position.
Query = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Recall:
    """Of one engine and class; shares are means over queries, 1 is all of the keys.

    Attributes:
        queries: that were compared with TP1's.
        tp1: share of TP1's keys; of the same model with other roundings, so below 1 by near-ties.
        referenced: queries that were compared with the reference.
        reference: share of the keys that float64 selects from the engine's own hidden states.
    """

    queries: int
    tp1: float
    referenced: int
    reference: float

    def as_json(self) -> dict[str, Any]:
        """JSON knows no NaN: null."""
        return {k: None if math.isnan(v) else v for k, v in asdict(self).items()}


def of_engines(
    results: Mapping[str, EngineResult],
    baselines: Mapping[str, str],
    prompts: Sequence[Prompt],
    model: RehearsalModel,
) -> dict[str, dict[str, Recall]]:
    """By engine and length class; engines that kept nothing are left out.

    Args:
        results: of the engines, by name.
        baselines: name of each one's TP1.
        prompts: what they served.
        model: their checkpoint.
    """
    if not any("record" in rank for name in baselines for rank in results[name].ranks):
        return {}
    from .kept import Kept
    from .selection import reference_recalls, tp1_recalls

    kept = {
        name: found for name in baselines if (found := Kept.read(results[name].ranks)) is not None
    }
    return {
        name: by_class(
            tp1_recalls(own, kept[baselines[name]]), reference_recalls(own, prompts, model), prompts
        )
        for name, own in kept.items()
        if baselines[name] in kept
    }


def by_class(
    against_tp1: Mapping[Query, float],
    against_reference: Mapping[Query, float],
    prompts: Sequence[Prompt],
) -> dict[str, Recall]:
    """The means of each length class; NaN where nothing was compared."""
    found = {}
    for name in dict.fromkeys(prompt.length_class for prompt in prompts):
        of_class = [
            [value for query, value in values.items() if prompts[query[0]].length_class == name]
            for values in (against_tp1, against_reference)
        ]
        means = [sum(values) / len(values) if values else float("nan") for values in of_class]
        found[name] = Recall(len(of_class[0]), means[0], len(of_class[1]), means[1])
    return found
