"""What all works share while they measure: the machine, its ceilings, how to time and to check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.errors import TritonError

from .floor import Ceilings, Demand
from .rows import Row
from .timing import GraphStopwatch, Stopwatch, Timing, compare

#: Errors with which a kernel refuses a shape or a GPU: said in its row, the others go on.
REFUSALS = (ValueError, RuntimeError, ImportError, TritonError)


@dataclass(slots=True)
class Workbench:
    """One run of ``bench``.

    Attributes:
        device: where work runs.
        quick: whether to leave sizes out.
        ceilings: of this machine; None where they were not measured.
        num_sms: multiprocessors.
        l2_bytes: of its last cache.
        stopwatch: times launches.
        remarks: what works have to say beside their rows.
        fits: lines through measured points, as objects.
        estimates: what was estimated on paper, as objects.
    """

    device: torch.device
    quick: bool
    ceilings: Ceilings | None
    num_sms: int
    l2_bytes: int
    stopwatch: Stopwatch = field(default_factory=GraphStopwatch)
    remarks: list[str] = field(default_factory=list)
    fits: list[dict[str, Any]] = field(default_factory=list)
    estimates: list[dict[str, Any]] = field(default_factory=list)

    @property
    def budget_us(self) -> float:
        """How long to repeat a version."""
        return 60_000.0 if self.quick else 200_000.0

    def floor_us(self, demand: Demand) -> float | None:
        """What the machine needs at least, None without its ceilings."""
        return None if self.ceilings is None else self.ceilings.floor_us(demand)

    def measure(
        self,
        row: Callable[..., Row],
        checks: Mapping[Any, Callable[[], str | None]],
        works: Mapping[Any, Callable[[], object]],
        launches: int,
        **common: Any,
    ) -> list[Row]:
        """Checks every provider, then times those that are right side by side.

        Args:
            row: makes a row from a provider's name and figures.
            checks: what is wrong with a provider's result, None for nothing.
            works: a pass of each provider.
            launches: launches of a pass.
            common: figures that all rows have.
        """
        rows: list[Row] = []
        good = {}

        def refused(name: Any, error: Exception) -> None:
            rows.append(row(provider=name, note=f"did not run: {_first_line(error)}", **common))

        for name, work in works.items():
            try:
                problem = checks[name]()
            except REFUSALS as error:
                refused(name, error)
                continue
            if problem is None:
                good[name] = work
            else:
                rows.append(row(provider=name, problem=problem, **common))
        timings: dict[Any, Timing] = compare(
            good,
            self.stopwatch,
            launches=launches,
            budget_us=self.budget_us,
            refusals=REFUSALS,
            refused=refused,
        )
        timed = [
            row(provider=name, us=timing.us, spread=timing.spread, **common)
            for name, timing in timings.items()
        ]
        return [*timed, *rows]


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200] if text else 'no message'}"
