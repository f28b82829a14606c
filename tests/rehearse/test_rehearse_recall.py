"""Selections against the float64 indexer and against TP1's, and the columns they become."""

import io
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from vllm_dcp_mla.rehearse import recall, report
from vllm_dcp_mla.rehearse.drift import Drift
from vllm_dcp_mla.rehearse.judge import Case
from vllm_dcp_mla.rehearse.machine import Machine
from vllm_dcp_mla.rehearse.recall import Recall, by_class
from vllm_dcp_mla.rehearse.rehearsal import Outcome
from vllm_dcp_mla.rehearse.workload import Prompt

TOPK, TOKENS = 16, 40
PROMPTS = [Prompt("to 16", (1,) * 9, 0), Prompt("to 48", (2,) * TOKENS, 0)]


def test_means_of_a_class():
    against_tp1 = {(0, 0, 8): 1.0, (1, 0, 39): 0.5, (1, 2, 39): 1.0}
    found = by_class(against_tp1, {(1, 0, 39): 0.25}, PROMPTS)
    assert found["to 48"] == Recall(2, 0.75, 1, 0.25)
    short = found["to 16"]
    assert (short.queries, short.tp1, short.referenced) == (1, 1.0, 0)
    assert math.isnan(short.reference)
    assert short.as_json() == {"queries": 1, "tp1": 1.0, "referenced": 0, "reference": None}


def test_engines_that_kept_nothing_need_no_torch(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    results = {"a": SimpleNamespace(ranks=[{"scores": []}])}
    assert recall.of_engines(results, {"a": "a"}, PROMPTS, None) == {}


def case(given):
    drift = Drift(32, 0.01, 0.01, 1.0, 0.9, 1.1)
    return Case("x: to 48 tokens", True, 1.1, 1.5, drift=drift, recall=given)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (Recall(8, 0.99125, 4, 0.98), "0.980"),
        (Recall(8, 0.99125, 0, math.nan), ""),
        (None, ""),
    ],
)
def test_columns(given, shown):
    outcome = Outcome([case(given), Case("x: runs", True, 0, 0, syncs=2, late_compiles=3)])
    machine = Machine(gpus=(), nccl=(2, 30, 3), versions={})
    table = report.table(outcome, machine)
    cells = {column.header: list(column.cells) for column in table.columns}
    assert cells["recall"] == [shown, ""]
    assert (cells["late"], cells["waits"]) == (["", "3"], ["", "2"])
    assert {len(column) for column in cells.values()} == {2}
    Console(file=io.StringIO()).print(table)
    said = json.loads(json.dumps(report.as_json(outcome, machine), allow_nan=False))
    kept = said["cases"][0]["recall"]
    assert kept == (None if given is None else given.as_json())


@pytest.fixture
def model(toy, tmp_path):
    """A toy checkpoint with two leaders."""
    from safetensors.torch import save_file

    from vllm_dcp_mla.rehearse.weights import random_weights

    (tmp_path / "config.json").write_text(json.dumps(toy))
    save_file(random_weights(toy, 3), tmp_path / "model.safetensors")
    return SimpleNamespace(folder=tmp_path, index_topk=TOPK)


def keep(model, choose, *, whole=True):
    """An engine that chose keys by ``choose(scores)`` for the last queries of the second prompt."""
    from vllm_dcp_mla.rehearse.kept import Kept

    return Kept.of([named(model, choose, whole=whole)])


def named(model, choose, *, whole=True):
    """What such an engine's one rank kept, by name."""
    import torch

    from vllm_dcp_mla.rehearse.indexer_reference import load_indexer

    hidden = torch.randn(TOKENS, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    tensors = {}
    for layer in (0, 1):
        scores = load_indexer(model.folder, layer).scores(
            hidden, torch.arange(TOKENS), torch.tensor([20, 39])
        )
        for position, row in zip((20, 39), scores, strict=True):
            tensors[f"1/{layer}/selected/{position}"] = choose(row).int()
        tensors[f"1/{layer}/selected/43"] = torch.arange(TOPK).int()
        if whole:
            tensors[f"1/{layer}/hidden/0"] = hidden.clone()
    return tensors


@pytest.mark.vllm
def test_the_reference_judges_by_the_engines_own_hidden_states(model):
    import torch

    from vllm_dcp_mla.rehearse.selection import reference_recalls, tp1_recalls

    right = keep(model, lambda row: row.topk(TOPK).indices)
    found = reference_recalls(right, PROMPTS, model)
    assert set(found) == {(1, layer, p) for layer in (0, 1) for p in (20, 39)}, "no decode steps"
    assert set(found.values()) == {1.0}
    half = keep(model, lambda row: row.topk(TOPK + TOPK // 2).indices[TOPK // 2 :])
    assert set(reference_recalls(half, PROMPTS, model).values()) == {0.5}
    assert reference_recalls(keep(model, lambda row: row.topk(TOPK).indices, whole=False),
                             PROMPTS, model) == {}  # fmt: skip
    against = tp1_recalls(half, right)
    assert {query: against[query] for query in found} == dict.fromkeys(found, 0.5)
    assert against[1, 0, 43] == 1
    none = keep(model, lambda row: torch.full((TOPK,), -1))
    assert tp1_recalls(none, none)[1, 0, 39] == 0, "no keys are none in common"
    assert tp1_recalls(right, right) == dict.fromkeys(against, 1.0)


@pytest.mark.vllm
def test_engines_by_name(model, tmp_path):
    from safetensors.torch import save_file

    save_file(named(model, lambda row: row.topk(TOPK).indices), tmp_path / "kept")
    ranks = [{"record": str(tmp_path / "kept")}]
    results = {
        "tp1": SimpleNamespace(ranks=ranks),
        "ours": SimpleNamespace(ranks=ranks),
        "broken": SimpleNamespace(ranks=[]),
    }
    found = recall.of_engines(results, dict.fromkeys(results, "tp1"), PROMPTS, model)
    assert list(found) == ["tp1", "ours"]
    assert found["ours"]["to 48"] == Recall(6, 1.0, 4, 1.0)
    assert recall.of_engines(results, {"ours": "broken", "broken": "broken"}, PROMPTS, model) == {}
    assert Path(model.folder).exists()
