"""What a measurement says: one row a provider and shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One provider at one shape.

    Attributes:
        work: name of the work, of :data:`.works.WORKS`.
        shape: the shape, for people.
        provider: who does it.
        us: microseconds; None where nothing was timed.
        spread: relative distance of two timings of the same version.
        floor_us: what the machine needs at least; None where no floor was derived.
        sizes: the shape, for programs.
        counted: what was counted instead of timed, by name.
        problem: why the provider's result is wrong; it is not timed then.
        note: why a provider was not timed, or what its figures leave out.
    """

    work: str
    shape: str
    provider: str
    us: float | None = None
    spread: float | None = None
    floor_us: float | None = None
    sizes: dict[str, int | str] = field(default_factory=dict)
    counted: dict[str, float] = field(default_factory=dict)
    problem: str | None = None
    note: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The row as an object; what does not apply is null or left out."""
        always = {
            "work": self.work,
            "shape": self.shape,
            "provider": self.provider,
            "us": _rounded(self.us),
            "spread": _rounded(self.spread),
            "floor_us": _rounded(self.floor_us),
            "sizes": self.sizes,
        }
        sometimes = {"counted": self.counted, "problem": self.problem, "note": self.note}
        return {**always, **{name: value for name, value in sometimes.items() if value}}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
