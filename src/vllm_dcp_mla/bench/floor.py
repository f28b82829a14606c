"""The time below which no attention launch can be, from bytes and operations alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a machine was measured to do at best.

    Attributes:
        bytes_per_us: of a large copy, bytes read and bytes written.
        flops_per_us: of a large bf16 matrix product, which fp8 rows are turned into as well.
    """

    bytes_per_us: float
    flops_per_us: float

    def floor_us(self, demand: Demand) -> float:
        """The larger of the times that memory and matrix units need."""
        return max(demand.bytes / self.bytes_per_us, demand.flops / self.flops_per_us)

    def bound_by(self, demand: Demand) -> str:
        """Which of the two: ``bytes`` or ``flops``."""
        memory = demand.bytes / self.bytes_per_us
        return "bytes" if memory >= demand.flops / self.flops_per_us else "flops"


@dataclass(frozen=True, slots=True)
class Demand:
    """What a launch must move and compute at least."""

    bytes: int
    flops: int


def attention(
    tokens: int,
    heads: int,
    rows: int,
    *,
    key_dim: int = 576,
    value_dim: int = 512,
    element_bytes: int = 2,
    row_bytes: int | None = None,
) -> Demand:
    """Sparse MLA of one rank: every token reads its own rows, once for all heads.

    Rows are drawn at random from a cache far larger than the L2, so that tokens share none.

    Args:
        tokens: tokens of the launch.
        heads: query heads.
        rows: keys of a token on this rank.
        key_dim, value_dim: elements of a key and of a value, its first part.
        element_bytes: of an element of the cache.
        row_bytes: of a whole row, where it holds more than its elements.
    """
    row = row_bytes if row_bytes is not None else key_dim * element_bytes
    index, half, single = 4, 2, 4
    moved = (
        tokens * rows * (row + index)
        + tokens * heads * (key_dim + value_dim) * half
        + tokens * heads * single
    )
    return Demand(moved, 2 * tokens * heads * rows * (key_dim + value_dim))
