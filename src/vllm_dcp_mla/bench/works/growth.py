"""How time grows with tokens, heads, local rows, ranks and context, and what eight GPUs would take.

A line is fitted to each, where all else stays as it is. The kernel is the one the backend would
dispatch to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ...kernels.base import LaunchShape
from ..engine import Batch
from ..fits import Line, estimate_step, fit
from ..inputs import CACHES, DIMS, TOPK, make_cache
from ..rows import Row
from ..workbench import Workbench
from .attention import at_shape
from .metadata import PROVIDERS, at_batch

_TOKENS, _HEADS, _ROWS = 64, 64, 512
#: Units of each line; ranks share the rows of a token.
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
HEADS = (16, 32, 64, 128)
ROWS = (128, 256, 512, 1024, 2048)
CONTEXTS = (16_384, 131_072, 524_288, 1_048_576)
STEP = 16_384
_DISPATCHED = "as dispatched"
#: GLM-5.2 on H200: NVLink's datasheet, 450 GB/s in each direction of a GPU.
_LAYERS = 78
_LINK_BYTES_PER_US = 450_000.0
_ESTIMATED_TOKENS = (1, 16, 64, 256)
_ESTIMATED_DCP = (1, 2, 4, 8)


def run(workbench: Workbench) -> Iterator[Row]:
    """Rows of every point; fits and estimates go to the workbench."""
    points: list[Row] = []
    cache = make_cache("bf16", workbench.device)
    step = 2 if workbench.quick else 1
    lines: dict[str, tuple[int, ...]] = {"tokens": TOKENS, "heads": HEADS, "rows": ROWS}
    for line, units in lines.items():
        for number in units[::step]:
            shape = {"tokens": _TOKENS, "heads": _HEADS, "rows": _ROWS} | {line: number}
            for row in _attention(workbench, cache, line, number, shape):
                points.append(row)
                yield row
    del cache
    for row in [r for r in points if r.sizes["line"] == "rows"]:
        ranks, left = divmod(TOPK, int(row.sizes["units"]))
        if ranks <= 8 and not left:
            points.append(_on_line(row, "ranks", ranks))
    for context in CONTEXTS[::step]:
        batch = Batch(f"prefill, {STEP:,} tokens of {context:,}", (context,), (STEP,), 0)
        for row in at_batch(workbench, batch):
            if row.sizes["time"] == "host" and row.us is not None:
                points.append(_on_line(replace(row, work="growth"), "context", context))
                yield points[-1]
    workbench.fits += fitted(points)
    workbench.estimates += estimated(points)


def _attention(
    workbench: Workbench, cache: Any, line: str, number: int, shape: dict[str, int]
) -> Iterator[Row]:
    from ...backends.hopper_kernels import choose_kernels

    tokens, heads, rows = shape["tokens"], shape["heads"], shape["rows"]
    launch = LaunchShape(heads, TOPK, CACHES["bf16"], DIMS)
    chosen = choose_kernels(launch, "auto", workbench.num_sms, rows).of(tokens)
    for row in at_shape(workbench, "growth", cache, tokens, heads, rows, (chosen.name,)):
        yield replace(
            _on_line(row, line, number),
            provider=_DISPATCHED,
            note=row.note or f"kernel {chosen.name}",
        )


def _on_line(row: Row, line: str, units: int) -> Row:
    return replace(row, sizes={**row.sizes, "line": line, "units": units})


def _points(rows: list[Row], line: str, provider: str) -> list[tuple[float, float]]:
    return [
        (float(row.sizes["units"]), row.us)
        for row in rows
        if row.sizes["line"] == line and row.provider == provider and row.us is not None
    ]


def fitted(rows: list[Row]) -> list[dict[str, Any]]:
    """The line through the points of each quantity and provider, where there are two or more.

    More ranks are fewer rows each: that line goes over ``1 / ranks``.
    """
    lines = []
    for line in ("tokens", "heads", "rows", "ranks", "context"):
        for provider in (_DISPATCHED, *PROVIDERS):
            points = _points(rows, line, provider)
            if line == "ranks":
                points = [(1 / ranks, us) for ranks, us in points]
            if len({units for units, _ in points}) < 2:
                continue
            found = fit(points)
            lines.append(
                {
                    "line": line,
                    "unit": "1 / ranks" if line == "ranks" else line,
                    "provider": provider,
                    "fixed_us": round(found.fixed_us, 3),
                    "per_unit_us": found.per_unit_us,
                    "worst": round(found.worst, 3),
                }
            )
    return lines


def estimated(rows: list[Row]) -> list[dict[str, Any]]:
    """Decode steps of GLM-5.2's layers on 1 to 8 GPUs, from one line over tokens times rows."""
    points = [
        (float(row.sizes["tokens"]) * float(row.sizes["rows"]), row.us)
        for row in rows
        if row.sizes["line"] in ("tokens", "rows") and row.us is not None
    ]
    if len({units for units, _ in points}) < 2:
        return []
    line: Line = fit(points)
    made = []
    for tokens in _ESTIMATED_TOKENS:
        for dcp in _ESTIMATED_DCP:
            found = estimate_step(
                line,
                dcp=dcp,
                tokens=tokens,
                heads=_HEADS,
                topk=TOPK,
                layers=_LAYERS,
                link_bytes_per_us=_LINK_BYTES_PER_US,
            )
            made.append(
                {
                    "tokens": tokens,
                    "dcp": dcp,
                    "attention_us": round(found.attention_us, 1),
                    "exchange_us": round(found.exchange_us, 1),
                }
            )
    return made
