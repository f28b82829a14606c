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
    """One table a work, then fits and estimates; the first title names the machine."""
    title = machine_line(outcome.machine)
    for work in outcome.works:
        rows = [row for row in outcome.rows if row.work == work.name]
        if rows:
            yield _table(f"{title}\n{work.name}: {work.title}", rows)
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
    table = Table(title=title, title_justify="left")
    table.add_column("shape")
    table.add_column("provider")
    for heading in ("us", "spread", "floor us", "of floor"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for row in rows:
        table.add_row(row.shape, row.provider, *_figures(row), _said(row))
    return table


def _figures(row: Row) -> list[str]:
    us = "-" if row.us is None else f"{row.us:,.1f}"
    spread = "-" if row.spread is None else f"{row.spread:.1%}"
    floor = "-" if row.floor_us is None else f"{row.floor_us:,.2f}"
    share = "-"
    if row.us and row.floor_us is not None:
        share = f"{row.floor_us / row.us:.0%}"
    return [us, spread, floor, share]


def _said(row: Row) -> str:
    counted = ", ".join(f"{name} {value:,.0f}" for name, value in row.counted.items())
    wrong = f"WRONG: {row.problem}" if row.problem else None
    return "; ".join(filter(None, (wrong, counted, row.note)))


def _objects(title: str, objects: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in objects[0]:
        table.add_column(name, justify="left" if name in ("line", "provider") else "right")
    for one in objects:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in one.values()))
    return table
