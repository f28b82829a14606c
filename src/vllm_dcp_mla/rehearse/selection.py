"""What indexers selected, against the reference and against each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .checkpoint import RehearsalModel
from .indexer_reference import load_indexer, recall
from .kept import Kept
from .recall import Query
from .workload import Prompt


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


def _keys(selected: torch.Tensor) -> set[int]:
    return {position for position in selected.tolist() if position >= 0}
