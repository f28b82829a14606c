"""What measured attention says of the dispatch: where it is behind, and the table that is not."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ..kernel_choice import FEW_HEADS, kernels_by_tokens
from ..key_splits import head_blocks
from .rows import Row

#: How far behind the fastest the dispatch may be.
BEHIND = 0.05
#: How far a line of the table that is made here may be, for fewer lines.
_NEAR = 0.02


def where_behind(rows: list[Row]) -> list[str]:
    """The shapes at which another kernel is faster than the one dispatched to, and by how much."""
    said = []
    for shape, timed in _by_shape(rows).items():
        sizes: dict[str, Any] = timed[0].sizes
        times = {row.provider: _us(row) for row in timed}
        steps = kernels_by_tokens(sizes["heads"], sizes["rows"], times)
        taken = next((name for most, name in steps if sizes["tokens"] <= most), None)
        if taken is None:
            continue
        best = min(times, key=lambda name: times[name])
        behind = times[taken] / times[best] - 1
        if behind > BEHIND:
            said.append(f"{shape}: dispatched to {taken}, {behind:.0%} behind {best}.")
    return said


def suggested(rows: list[Row]) -> list[str]:
    """Lines of ``kernel_choice.PREFERENCES`` that follow from what was measured of a bf16 cache.

    Each line reaches as many measured sizes as one kernel can serve within 2 % of the fastest, and
    ends at the last of them.
    """
    # Of each kernel over the fastest; where head counts meet in a size, the worst of them.
    slower: dict[tuple[bool, int], dict[int, dict[str, float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for timed in _by_shape(rows).values():
        sizes: dict[str, Any] = timed[0].sizes
        if sizes["cache"] != "bf16":
            continue
        many = sizes["heads"] > FEW_HEADS
        at = slower[many, sizes["rows"]][sizes["tokens"] * head_blocks(sizes["heads"])]
        best = min(_us(row) for row in timed)
        for row in timed:
            at[row.provider] = max(at.get(row.provider, 1.0), _us(row) / best)
    lines = []
    for many, number in sorted(slower):
        heads = "ANY" if many else "FEW_HEADS"
        last = max(keys for kind, keys in slower if kind == many)
        bound = "ANY" if number == last else str(number)
        lines += [
            f"Preference({heads}, {bound}, {most}, {name!r}),"
            for most, name in _steps(slower[many, number])
        ]
    return lines


def _steps(slower: dict[int, dict[str, float]]) -> list[tuple[str, str]]:
    """``slower`` by sizes and kernels; the kernel that serves well for longest, step by step."""
    sizes = sorted(slower)
    good = [
        {n for n, over in at.items() if over <= max(1 + _NEAR, min(at.values()))}
        for at in (slower[size] for size in sizes)
    ]
    steps = []
    first = 0
    while first < len(sizes):
        ends = {
            name: next((k for k in range(first, len(sizes)) if name not in good[k]), len(sizes))
            for name in sorted(good[first])
        }
        name = max(ends, key=lambda n: ends[n])
        first = ends[name]
        steps.append(("ANY" if first == len(sizes) else str(sizes[first - 1]), name))
    return steps


def _by_shape(rows: list[Row]) -> dict[str, list[Row]]:
    found = defaultdict(list)
    for row in rows:
        if row.us is not None:
            found[row.shape].append(row)
    return found


def _us(row: Row) -> float:
    assert row.us is not None
    return row.us
