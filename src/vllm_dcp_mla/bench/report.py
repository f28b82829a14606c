"""A run's outcome for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from .rows import Row
from .run import Outcome


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The machine-readable outcome."""
    return {
        "ok": outcome.ok,
        "problems": outcome.problems,
        "machine": outcome.machine,
        "rows": [row.as_json() for row in outcome.rows],
        "fits": outcome.fits,
        "estimates": outcome.estimates,
        "remarks": outcome.remarks,
        "not_measured": outcome.not_measured,
        "seconds": round(outcome.seconds, 1),
    }


def tables(outcome: Outcome) -> Iterator[Table]:
    """One table a work, then fits and estimates."""
    for work in outcome.works:
        rows = [row for row in outcome.rows if row.work == work.name]
        if rows:
            yield _table(f"{work.name}: {work.title}", rows)
    if outcome.fits:
        yield _objects("us = fixed + per unit; worst: the point farthest off", outcome.fits)
    if outcome.estimates:
        yield _objects(
            "78 layers of GLM-5.2 on paper, us a decode step; links at 450 GB/s, no latencies",
            outcome.estimates,
        )


def machine_line(machine: dict[str, Any]) -> str:
    """The machine in one line."""
    versions = ", ".join(f"{name} {v}" for name, v in machine["versions"].items() if v)
    if machine["gpu"] is None:
        return f"no GPU, {machine['cpu_cores']} CPU cores; {versions}"
    return (
        f"{machine['gpu']}: {machine['bandwidth_tb_s']} TB/s, {machine['bf16_tflop_s']} TFLOP/s "
        f"bf16, measured; {versions}"
    )


def _table(title: str, rows: list[Row]) -> Table:
    """Columns that no row fills are left out."""
    counted = dict.fromkeys(name for row in rows for name in row.counted)
    columns = {
        "us": [_number(row.us, ".1f") for row in rows],
        "spread": [_number(row.spread, ".1%") for row in rows],
        "floor us": [_number(row.floor_us, ".2f") for row in rows],
        "of floor": [_number(_share(row), ".0%") for row in rows],
        **{
            name.replace("_", " "): [_number(row.counted.get(name), ".0f") for row in rows]
            for name in counted
        },
        "": [_said(row) for row in rows],
    }
    shown = {heading: cells for heading, cells in columns.items() if any(cells)}
    table = Table(title=title, title_justify="left")
    table.add_column("shape")
    table.add_column("provider")
    for heading in shown:
        table.add_column(heading, justify="right" if heading else "left")
    for number, row in enumerate(rows):
        table.add_row(row.shape, row.provider, *(cells[number] for cells in shown.values()))
    return table


def _number(value: float | None, how: str) -> str:
    return "" if value is None else f"{value:,{how}}"


def _share(row: Row) -> float | None:
    """The machine's floor over the time."""
    return row.floor_us / row.us if row.us and row.floor_us is not None else None


def _said(row: Row) -> str:
    wrong = f"WRONG: {row.problem}" if row.problem else None
    return "; ".join(filter(None, (wrong, row.note)))


def _objects(title: str, objects: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in objects[0]:
        table.add_column(name, justify="left" if name in ("line", "provider") else "right")
    for one in objects:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in one.values()))
    return table
