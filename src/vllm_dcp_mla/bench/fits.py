"""What a unit costs: lines through measured points, and what follows for more GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """``us = fixed_us + per_unit_us * units``.

    Attributes:
        fixed_us: microseconds that any number of units takes.
        per_unit_us: microseconds a unit.
        worst: largest relative distance of a point from the line.
    """

    fixed_us: float
    per_unit_us: float
    worst: float

    def at(self, units: float) -> float:
        """Microseconds of so many units."""
        return self.fixed_us + self.per_unit_us * units


def fit(points: Sequence[tuple[float, float]]) -> Line:
    """The line with the least squares of relative errors, so that short launches count as well.

    A negative fixed cost means nothing: the line then goes through the origin.

    Args:
        points: ``(units, us)`` with microseconds above 0, of at least two different units.

    Raises:
        ValueError: too few points, or a time that is not above 0.
    """
    if len({units for units, _ in points}) < 2 or any(us <= 0 for _, us in points):
        raise ValueError(f"a line needs times above 0 at two different sizes, got {list(points)}")
    weights = [1 / us**2 for _, us in points]
    total = sum(weights)
    mean_units = sum(w * units for w, (units, _) in zip(weights, points, strict=True)) / total
    mean_us = sum(w * us for w, (_, us) in zip(weights, points, strict=True)) / total
    across = sum(
        w * (units - mean_units) * (us - mean_us)
        for w, (units, us) in zip(weights, points, strict=True)
    )
    along = sum(
        w * (units - mean_units) ** 2 for w, (units, _) in zip(weights, points, strict=True)
    )
    per_unit = across / along
    fixed = mean_us - per_unit * mean_units
    if fixed < 0:
        fixed = 0.0
        per_unit = sum(
            w * units * us for w, (units, us) in zip(weights, points, strict=True)
        ) / sum(w * units**2 for w, (units, _) in zip(weights, points, strict=True))
    worst = max(abs(fixed + per_unit * units - us) / us for units, us in points)
    return Line(fixed, per_unit, worst)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A decode step of all layers on paper.

    Attributes:
        dcp: ranks that share the cache.
        tokens: of the step.
        attention_us: of all layers, from the fit.
        exchange_us: bytes that a rank sends for query gather and merge over the links' rate.
    """

    dcp: int
    tokens: int
    attention_us: float
    exchange_us: float


def estimate_step(
    line: Line,
    *,
    dcp: int,
    tokens: int,
    heads: int,
    topk: int,
    layers: int,
    link_bytes_per_us: float,
    key_dim: int = 576,
    value_dim: int = 512,
) -> Estimate:
    """A step of ``dcp`` GPUs from what one GPU measured.

    A rank attends ``topk / dcp`` rows of each token with all ``heads``, receives the other ranks'
    queries, and sends them their heads' partial results with the LSE (2 elements), in bf16.
    Latencies of the exchange are left out.

    Args:
        line: microseconds of a launch by ``tokens * rows``.
        dcp: ranks of the group.
        tokens: tokens of the step.
        heads: heads of all ranks of the group.
        topk: keys a token selects.
        layers: attention layers.
        link_bytes_per_us: what a GPU sends or receives at best.
        key_dim, value_dim: elements of a query and of a result.
    """
    others = (dcp - 1) / dcp
    exchanged = tokens * heads * (key_dim + value_dim + 2) * 2 * others
    return Estimate(
        dcp,
        tokens,
        layers * line.at(tokens * topk / dcp),
        layers * exchanged / link_bytes_per_us,
    )
