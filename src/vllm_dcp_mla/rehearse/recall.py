"""Which share of the right keys an engine's indexers selected, for each length class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .checkpoint import RehearsalModel
from .indexer_reference import load_indexer, recall
from .kept import Kept, Query
from .workload import Prompt


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


def reference_recalls(
    kept: Kept, prompts: Sequence[Prompt], model: RehearsalModel
) -> dict[Query, float]:
    """For each query of a whole prompt the share of the reference's keys."""
    found: dict[Query, float] = {}
    by_prompt: dict[tuple[int, int], list[tuple[int, torch.Tensor]]] = {}
    for (prompt, layer, position), selected in kept.queries().items():
        if position < len(prompts[prompt].tokens):
            by_prompt.setdefault((layer, prompt), []).append((position, selected))
    indexers = {
        layer: load_indexer(model.folder, layer) for layer in {layer for layer, _ in by_prompt}
    }
    for (layer, prompt), queries in sorted(by_prompt.items()):
        length = len(prompts[prompt].tokens)
        hidden = kept.hidden(prompt, layer, length)
        if hidden is None:
            continue
        rows = torch.tensor([position for position, _ in queries])
        scores = indexers[layer].scores(hidden, torch.arange(length), rows)
        for (position, selected), row in zip(queries, scores, strict=True):
            found[prompt, layer, position] = recall(selected.tolist(), row, model.index_topk)
    return found


def tp1_recalls(kept: Kept, tp1: Kept) -> dict[Query, float]:
    """For each query that both kept the share of TP1's keys."""
    theirs, found = tp1.queries(), {}
    for query, selected in kept.queries().items():
        if query in theirs:
            wanted = _keys(theirs[query])
            found[query] = len(wanted & _keys(selected)) / max(len(wanted), 1)
    return found


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


def _keys(selected: torch.Tensor) -> set[int]:
    return {position for position in selected.tolist() if position >= 0}
