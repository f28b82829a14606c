"""One launch of a large step against the same step in smaller launches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ...kernels.base import LaunchBuffers, LaunchShape, SparseMlaBatch, SparseMlaKernel
from .. import floor
from ..inputs import CACHES, DIMS, TOPK, make_cache, make_sets
from ..rows import Row
from ..workbench import Workbench
from .attention import checked, launch, load_kernels, make_buffers

TOKENS = (8192, 32_768)
LIMITS = (1024, 2048, 4096, 8192)
_QUICK_LIMITS = (1024, 4096)
_HEADS = 64
_ROWS = 512
#: How much more a step may take for being split.
TOLERATED = 0.03


def run(workbench: Workbench) -> Iterator[Row]:
    """Rows of every kernel and limit; then the smallest limit that costs little."""
    cache = make_cache("bf16", workbench.device)
    shape = LaunchShape(_HEADS, TOPK, CACHES["bf16"], DIMS)
    kernels, _ = load_kernels(workbench, shape, _ROWS)
    buffers = make_buffers(workbench)
    limits = _QUICK_LIMITS if workbench.quick else LIMITS
    mine: list[Row] = []
    for tokens in TOKENS[:1] if workbench.quick else TOKENS:
        (batch,) = make_sets(cache, tokens, _HEADS, _ROWS, 1)
        demand = floor.attention(tokens, _HEADS, _ROWS)
        for name, kernel in kernels.items():
            works = {
                limit: partial(_launches, kernel, batch, buffers, limit)
                for limit in (*(n for n in limits if n < tokens), tokens)
            }
            for row in workbench.measure(
                partial(_row, name, tokens),
                {limit: partial(_checked, kernel, batch, buffers) for limit in works},
                works,
                1,
                floor_us=workbench.floor_us(demand),
            ):
                mine.append(row)
                yield row
        del batch
    workbench.remarks += verdicts(mine)


def _row(name: str, tokens: int, provider: int, **figures: object) -> Row:
    """A row; what is compared here are limits, the provider is the kernel."""
    per = "one launch" if provider >= tokens else f"launches of {provider:,}"
    return Row(
        "split",
        f"{tokens:,} tokens, {_ROWS} rows, {_HEADS} heads, bf16, {per}",
        name,
        sizes={"tokens": tokens, "tokens_per_launch": provider},
        **figures,  # type: ignore[arg-type]
    )


def _launches(
    kernel: SparseMlaKernel, batch: SparseMlaBatch, buffers: LaunchBuffers, limit: int
) -> None:
    tokens = len(batch.query)
    for start in range(0, tokens, limit):
        part = batch if limit >= tokens else batch.tokens(slice(start, start + limit))
        launch(kernel, part, buffers)


def _checked(kernel: SparseMlaKernel, batch: SparseMlaBatch, buffers: LaunchBuffers) -> str | None:
    return checked(kernel, batch.tokens(slice(0, min(len(batch.query), 1024))), buffers)


def verdicts(rows: list[Row]) -> list[str]:
    """For each kernel and step, the smallest limit within the tolerance of one launch."""
    said = []
    groups: dict[tuple[str, int], dict[int, float]] = {}
    for row in rows:
        if row.us is not None:
            key = (row.provider, int(row.sizes["tokens"]))
            groups.setdefault(key, {})[int(row.sizes["tokens_per_launch"])] = row.us
    for (name, tokens), times in groups.items():
        one = times.get(tokens)
        if one is None:
            continue
        ratios = {limit: us / one for limit, us in sorted(times.items())}
        fine = [limit for limit, ratio in ratios.items() if ratio <= 1 + TOLERATED]
        listed = ", ".join(f"{limit:,}: {ratio:.3f}" for limit, ratio in ratios.items())
        said.append(
            f"{name}, {tokens:,} tokens: time over one launch's by tokens a launch: {listed}; "
            f"from {min(fine):,} on within {TOLERATED:.0%}."
        )
    return said
