"""The same budget from figures of a server log, or of ``nvidia-smi``, instead of a model."""

from __future__ import annotations

from dataclasses import dataclass

from .budget import Budget
from .outcome import gib
from .request import DEFAULT_UTILIZATION, UNREADABLE, RequestError, read_gib, read_number

_FLAG_OF = {
    "total_bytes": "--total-gib",
    "non_kv_bytes": "--non-kv-gib",
    "graphs_bytes": "--graphs-gib",
    "autotune_bytes": "--autotune-gib",
    "kv_bytes": "--kv-gib",
    "free_bytes": "--free-gib",
}


@dataclass(frozen=True, slots=True)
class RawFigures:
    """Figures as typed, in GiB; None where one was left out."""

    total_gib: str | None = None
    non_kv_gib: str | None = None
    graphs_gib: str | None = None
    autotune_gib: str | None = None
    kv_gib: str | None = None
    free_gib: str | None = None
    utilization: str = DEFAULT_UTILIZATION
    logged_utilization: str = DEFAULT_UTILIZATION

    @property
    def replace_a_model(self) -> bool:
        """Whether they are a log's: those that a model's plan does not take are there."""
        return any(text is not None for text in (self.non_kv_gib, self.kv_gib, self.free_gib))


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a start of vLLM, in bytes; None where one is not known.

    Attributes:
        total_bytes: memory of the GPU.
        non_kv_bytes: what profiling counted, without graphs.
        graphs_bytes: vLLM's estimate of CUDA graphs.
        autotune_bytes: what autotuning asked for.
        kv_bytes: memory of the KV cache.
        free_bytes: what was free once the KV cache was made.
        utilization: the share to plan with.
        logged_utilization: the share that KV and free memory were logged with.
    """

    total_bytes: int
    non_kv_bytes: int | None
    graphs_bytes: int
    autotune_bytes: int
    kv_bytes: int | None
    free_bytes: int | None
    utilization: float
    logged_utilization: float


@dataclass(frozen=True, slots=True)
class FiguresPlan:
    """The answer.

    Attributes:
        budget: the budget at the utilisation asked for; its ``outside_bytes`` is the autotuning and
            what was used beside the requested share already.
        problems: why it does not work, one sentence each.
        notes: what the figures do not say.
    """

    budget: Budget | None
    problems: list[str]
    notes: list[str]


def read_figures(raw: RawFigures) -> Figures:
    """Reads the flags.

    Raises:
        RequestError: a flag that is no number of GiB, or one without which nothing follows.
    """
    problems: list[str] = []
    sizes = {
        name: read_gib(
            flag, getattr(raw, name.replace("_bytes", "_gib")), problems, signed=name == "kv_bytes"
        )
        for name, flag in _FLAG_OF.items()
    }
    shares = {
        flag: read_number(flag, text, problems)
        for flag, text in (
            ("--utilization", raw.utilization),
            ("--logged-utilization", raw.logged_utilization),
        )
    }
    for flag, share in shares.items():
        if not 0 < share <= 1 and not any(problem.startswith(flag) for problem in problems):
            problems.append(
                f"{flag} is {share:g}, but it is a share of the GPU, above 0 and up to 1; use one "
                f"such as {DEFAULT_UTILIZATION}."
            )
    total = sizes["total_bytes"]
    if not total and not any(problem.startswith("--total-gib") for problem in problems):
        problems.append("--total-gib is missing; give the memory of one GPU, as vLLM logs it.")
    if sizes["non_kv_bytes"] is None and sizes["kv_bytes"] is None and total:
        problems.append("Give --non-kv-gib or --kv-gib too: the KV budget follows from either.")
    if problems or not total:
        raise RequestError(problems, UNREADABLE)
    return Figures(
        total_bytes=total,
        non_kv_bytes=sizes["non_kv_bytes"],
        graphs_bytes=sizes["graphs_bytes"] or 0,
        autotune_bytes=sizes["autotune_bytes"] or 0,
        kv_bytes=sizes["kv_bytes"],
        free_bytes=sizes["free_bytes"],
        utilization=shares["--utilization"],
        logged_utilization=shares["--logged-utilization"],
    )


def plan_figures(figures: Figures) -> FiguresPlan:
    """Plans with figures.

    The KV cache and the free memory change with the share as much as the share does: what else is
    allocated stays.
    """
    logged = Budget(figures.total_bytes, figures.logged_utilization, 0)
    if impossible := _impossible(figures, logged):
        return FiguresPlan(None, impossible, [])
    non_kv = figures.non_kv_bytes
    if non_kv is None:
        assert figures.kv_bytes is not None
        non_kv = logged.requested_bytes - figures.graphs_bytes - figures.kv_bytes
    used_outside = 0
    notes = []
    if figures.free_bytes is not None:
        used_outside = logged.slack_bytes - figures.free_bytes
    else:
        notes.append(
            "Without --free-gib the CUDA context, NCCL and what is made after profiling are not "
            "known: the largest safe utilisation is smaller than said, by what they take."
        )
    budget = Budget(
        total_bytes=figures.total_bytes,
        utilization=figures.utilization,
        non_kv_bytes=non_kv,
        graphs_bytes=figures.graphs_bytes,
        outside_bytes=used_outside + figures.autotune_bytes,
    )
    return FiguresPlan(budget, _problems(figures, budget, used_outside), notes)


def _impossible(figures: Figures, logged: Budget) -> list[str]:
    """Figures that cannot be of one start of vLLM."""
    share = (
        f"--total-gib {gib(figures.total_bytes)} at --logged-utilization "
        f"{figures.logged_utilization:g}"
    )
    problems = []
    kv, free = figures.kv_bytes, figures.free_bytes
    if kv is not None and kv + figures.graphs_bytes > logged.requested_bytes:
        problems.append(
            f"--kv-gib is {gib(kv)}, but vLLM plans with {gib(logged.requested_bytes)}, graphs "
            f"included, of {share}; give the figures of one start."
        )
    most_free = logged.slack_bytes + figures.graphs_bytes  # graphs are captured later
    if free is not None and free > most_free:
        problems.append(
            f"--free-gib is {gib(free)}, but no more than {gib(most_free)} lie beside what vLLM "
            f"takes of {share}; give what was free once the KV cache was made."
        )
    return problems


def _problems(figures: Figures, budget: Budget, used_outside: int) -> list[str]:
    problems, safe = [], budget.largest_utilization
    if budget.kv_bytes <= 0:
        way_out = (
            "no safe --gpu-memory-utilization leaves any"
            if safe is None
            else "more than --gpu-memory-utilization "
            f"{budget.utilization_for_any_kv:g} would leave some"
        )
        parts = [("memory counted by profiling", budget.non_kv_bytes)]
        parts.append(("CUDA graphs", budget.graphs_bytes))
        parts.sort(key=lambda part: -part[1])
        named = ", ".join(f"{name} {gib(size)}" for name, size in parts if size)
        problems.append(
            f"The KV budget is {gib(budget.kv_bytes)} of {gib(budget.requested_bytes)} requested; "
            f"{way_out}. The largest lines: {named}. Fewer tokens a step, shorter contexts, fewer "
            "or no CUDA graphs, or more ranks make them smaller."
        )
    if budget.free_bytes < 0:
        autotune = f"autotuning needs {gib(figures.autotune_bytes)}, but "
        problems.append(
            f"At --gpu-memory-utilization {budget.utilization:g} "
            f"{autotune if figures.autotune_bytes else ''}"
            f"{gib(budget.slack_bytes - used_outside)} are free beside the KV cache; "
            + ("none leaves room for both." if safe is None else f"use {safe:g} or less.")
        )
    return problems
