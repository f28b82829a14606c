"""Every way to cut our kernel's work; what is best belongs into ``key_splits.CHOICES``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch

from ...kernels import triton_decode
from ...key_splits import Tiling
from .. import floor
from ..candidates import CANDIDATES
from ..inputs import CACHES, DIMS, Cache, make_cache
from ..rows import Row
from ..workbench import Workbench
from .attention import (
    QUICK_SHAPES,
    SHAPES,
    checked,
    launch_all,
    make_batches,
    make_buffers,
)

TOKENS = (1, 4, 16, 64)  # blocks of 64 heads win by far behind these
_QUICK_TOKENS = (1, 16)


def run(workbench: Workbench) -> Iterator[Row]:
    """Rows of every candidate; the best of each shape as a line for the table."""
    tokens = _QUICK_TOKENS if workbench.quick else TOKENS
    shapes = QUICK_SHAPES if workbench.quick else SHAPES
    for cache_name, dtype in CACHES.items():
        _compile(dtype)
        cache = make_cache(cache_name, workbench.device)
        for heads, rows in shapes:
            for number in tokens:
                timed = _at_shape(workbench, cache, cache_name, number, heads, rows)
                yield from timed
                workbench.remarks += best_choice(timed)
        del cache


def _compile(dtype: torch.dtype) -> None:
    """Compiles all candidates, in parallel where vLLM can."""
    triton_decode.warm_up(
        dtype, DIMS, CANDIDATES, lambda kernel, *arguments: kernel.warmup(*arguments)
    )


def _at_shape(
    workbench: Workbench,
    cache: Cache,
    cache_name: str,
    tokens: int,
    heads: int,
    rows: int,
) -> list[Row]:
    sets = make_batches(workbench, cache, tokens, heads, rows)
    buffers = make_buffers(workbench)
    kernels = {
        str(t): triton_decode.TritonDecodeKernel(workbench.num_sms, rows, t) for t in CANDIDATES
    }
    demand = floor.attention(tokens, heads, rows, element_bytes=cache.rows.element_size())
    row = partial(
        Row,
        "tilings",
        f"{tokens:,} tokens, {rows:,} rows, {heads} heads, {cache_name}",
        sizes={"tokens": tokens, "rows": rows, "heads": heads, "cache": cache_name},
    )
    return workbench.measure(
        row,
        {n: partial(checked, kernel, sets[0], buffers) for n, kernel in kernels.items()},
        {n: partial(launch_all, kernel, sets, buffers) for n, kernel in kernels.items()},
        len(sets),
        floor_us=workbench.floor_us(demand),
    )


def best_choice(rows: list[Row]) -> list[str]:
    """The fastest of a shape as a line of ``key_splits.CHOICES``, and its lead over the default."""
    times = {row.provider: row.us for row in rows if row.us is not None}
    if not times:
        return []
    best = min(times, key=lambda name: times[name])
    tiling = next(t for t in CANDIDATES if str(t) == best)
    sizes = rows[0].sizes
    default = times.get(str(Tiling()))
    lead = "" if default is None else f", {default:.1f} by default"
    scores = math.prod(int(sizes[name]) for name in ("tokens", "heads", "rows"))
    return [f"Choice({scores}, {tiling!r}),  # {rows[0].shape}: {times[best]:.1f} us{lead}"]
