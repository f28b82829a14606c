"""All timed rows on one page: time against size, with the machine's floor and the fitted lines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..planner import picture
from ..planner.request import IMPOSSIBLE, RequestError
from .rows import Row
from .run import Outcome

_COLUMNS = 3
#: A work's axis: what its rows differ in, and what tells its panels apart.
_AXES = {
    "attention": ("tokens", ("cache", "rows", "heads")),
    "split": ("tokens_per_launch", ("tokens",)),
    "step": ("tokens", ()),
    "prefill": ("tokens", ("context",)),
    "metadata": ("tokens", ("time", "context")),
    "growth": ("units", ("line",)),
    "tilings": ("tokens", ("cache", "rows", "heads")),
}


def check_target(file: str) -> None:
    """Refuses a file that could not be written later, before anything is measured.

    Raises:
        RequestError: an ending that is not known, a folder, no such folder, or no matplotlib that
            loads.
    """
    picture.check_name(file)
    path = Path(file)
    if not os.access(path.parent, os.W_OK):
        raise RequestError(
            [f"--plot cannot write {file}: no such folder to write to; name another file."],
            IMPOSSIBLE,
        )
    if path.is_dir():
        raise RequestError([f"--plot is {file}, which is a folder; name a file."], IMPOSSIBLE)
    picture.check_library()


def panels(rows: list[Row]) -> dict[str, dict[str, list[tuple[float, float, float | None]]]]:
    """Points ``(size, us, floor_us)`` of every provider, by panel, where sizes differ."""
    found: dict[str, dict[str, list[tuple[float, float, float | None]]]] = {}
    for row in rows:
        if row.us is None or row.work not in _AXES:
            continue
        axis, apart = _AXES[row.work]
        labels = [_label(name, row.sizes[name]) for name in apart]
        panel = f"{row.work}: {', '.join(labels) or axis}"
        point = (float(row.sizes[axis]), row.us, row.floor_us)
        found.setdefault(panel, {}).setdefault(row.provider, []).append(point)
    return {
        panel: providers
        for panel, providers in found.items()
        if len({x for points in providers.values() for x, _, _ in points}) > 1
    }


def _label(name: str, value: int | str) -> str:
    return str(value) if isinstance(value, str) else f"{value:,} {name}"


def draw(outcome: Outcome, file: str) -> str | None:
    """Writes one page; what to say where there is nothing to draw.

    Raises:
        RequestError: the file cannot be written.
    """
    drawn = panels(outcome.rows)
    if not drawn:
        return "Nothing was drawn: no work was timed at several sizes."
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, len(drawn))
    lines = -(-len(drawn) // columns)
    figure = Figure(figsize=(5.2 * columns, 3.4 * lines), layout="constrained")
    for number, (panel, providers) in enumerate(drawn.items(), 1):
        _fill(figure.add_subplot(lines, columns, number), panel, providers, outcome.fits)
    picture.save(figure, file, dpi=110)
    return None


def _fill(
    axes: Any,
    panel: str,
    providers: dict[str, list[tuple[float, float, float | None]]],
    fits: list[dict[str, Any]],
) -> None:
    floors: dict[float, float] = {}
    for provider, points in providers.items():
        points = sorted(points)
        (line,) = axes.plot(
            [x for x, _, _ in points], [us for _, us, _ in points], "o-", ms=3, label=provider
        )
        floors |= {x: floor for x, _, floor in points if floor is not None}
        for fitted in fits:
            if panel == f"growth: {fitted['line']}" and fitted["provider"] == provider:
                _draw_fit(axes, points, fitted, line.get_color())
    if floors:
        sizes = sorted(floors)
        axes.plot(sizes, [floors[x] for x in sizes], "k:", lw=1, label="floor")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(panel, fontsize=9, loc="left")
    axes.set_ylabel("us")
    axes.legend(fontsize=6, frameon=False)


def _draw_fit(
    axes: Any, points: list[tuple[float, float, float | None]], fitted: dict[str, Any], colour: str
) -> None:
    sizes = [x for x, _, _ in points]
    units = [1 / x for x in sizes] if fitted["unit"] == "1 / ranks" else sizes
    times = [fitted["fixed_us"] + fitted["per_unit_us"] * n for n in units]
    unit = f"{fitted['fixed_us']:.1f} + {fitted['per_unit_us']:.3g} a unit"
    axes.plot(sizes, times, "--", lw=1, color=colour, label=unit)
