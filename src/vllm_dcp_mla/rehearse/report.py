"""A rehearsal's outcome for people and for programs."""

from __future__ import annotations

import math
from typing import Any

from rich.table import Table

from .against_plan import summary
from .judge import Case
from .machine import Machine
from .rehearsal import Outcome

#: What no rehearsal on this kind of machine shows.
_SHARED_GPU = (
    "Ranks shared a GPU: direct symmetric-memory exchanges (VLLM_USE_DIRECT_DCP_A2A, "
    "VLLM_USE_DIRECT_DCP_Q_GATHER), FlashInfer's and custom all-reduce, FlashInfer's autotuning, "
    "KV budgets and speed were not rehearsed."
)
_REFERENCE = (
    "The reference kernel ran: neither trtllm-gen's cubins nor stock's branches for compute "
    "capability 10 were rehearsed."
)
_EXTERNAL_LAUNCHER = "Ranks ran under external_launcher: spawned workers were not rehearsed."
_DRAFTS = "Drafted tokens are forced: what the MTP layer computes was not compared."

_DRIFT_HEADINGS = ("drift", "noise", "ratio", "95 %", "limit")


def not_rehearsed(outcome: Outcome) -> list[str]:
    """What the outcome says nothing about, one sentence each."""
    said = [_EXTERNAL_LAUNCHER, _DRAFTS, *outcome.missing]
    if outcome.shared:
        said.append(_SHARED_GPU)
    if any("(reference)" in (engine["ran"] or "") for engine in outcome.engines.values()):
        said.append(_REFERENCE)
    return said


def remarks(outcome: Outcome) -> list[str]:
    """What to print under the table: problems, classes that ran, limits, the verdict."""
    wrong = sum(not case.ok for case in outcome.cases)
    lines = [f"{case.name}: {problem}" for case in outcome.cases for problem in case.problems]
    lines += [f"{case.name}: {summary(case.lines)}" for case in outcome.cases if case.lines]
    for name, engine in outcome.engines.items():
        lines.append(f"{name} ran {engine['ran']}." if engine["ran"] else f"{name} did not run.")
        late = engine.get("late_compiles", ())
        if late:
            lines.append(f"{name} compiled while serving: {'; '.join(late)}.")
    if outcome.scores != "normal":
        lines.append(f"Indexers' scores were {outcome.scores}.")
    lines += not_rehearsed(outcome)
    if outcome.folder is not None:
        lines.append(f"The logs are in {outcome.folder}.")
    done = len(outcome.cases) - wrong
    return [*lines, f"{done} of {len(outcome.cases)} cases are good, in {outcome.seconds:.0f} s."]


def as_json(outcome: Outcome, machine: Machine) -> dict[str, Any]:
    """The machine-readable outcome."""
    return {
        "ok": outcome.ok,
        "problems": [problem for case in outcome.cases for problem in case.problems],
        "machine": machine.model_dump(),
        "scores": outcome.scores,
        "engines": outcome.engines,
        "not_rehearsed": not_rehearsed(outcome),
        "seconds": round(outcome.seconds, 1),
        "logs": None if outcome.folder is None else str(outcome.folder),
        "cases": [case.as_json() for case in outcome.cases],
    }


def table(outcome: Outcome, machine: Machine) -> Table:
    """One line a case; the title names what ran."""
    gpus = ", ".join(f"{gpu.name}" for gpu in machine.gpus)
    versions = ", ".join(f"{name} {found}" for name, found in machine.versions.items())
    lines = Table(title=f"{gpus}; {versions}", title_justify="left")
    lines.add_column("case")
    for heading in (*_DRIFT_HEADINGS, "recall", "late", "waits", "seconds", ""):
        lines.add_column(heading, justify="right")
    for case in outcome.cases:
        lines.add_row(case.name, *_figures(case), "good" if case.ok else "WRONG")
    return lines


def _figures(case: Case) -> list[str]:
    drift = case.drift
    if drift is None:
        seconds = f"{case.seconds:.0f}" if case.seconds else ""
        return [*[""] * len(_DRIFT_HEADINGS), "", str(case.late_compiles), str(case.syncs), seconds]
    figures = [f"{drift.mean:.4f}", f"{drift.noise:.4f}", f"{drift.ratio:.2f}"]
    figures += [f"{drift.low:.2f}-{drift.high:.2f}", f"{case.limit}"]
    recall = math.nan if case.recall is None else case.recall.reference
    return [*figures, "" if math.isnan(recall) else f"{recall:.3f}", "", "", ""]
