"""A layer's step of one long prefill on Hopper: an fp8 cache as it is, and widened to bf16 first.

Ours from a bf16 cache and stock's FLASHMLA_SPARSE from its own stand beside.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from ...kernel_choice import widens
from .. import floor
from ..inputs import HEAD_DIM, TOPK
from ..rows import Row
from ..workbench import Workbench
from .step import (
    BLOCK,
    BLOCKS,
    DCP,
    DS_MLA_BYTES,
    HEADS,
    Selections,
    Version,
    ours,
    problem_of,
    random_cache,
    random_ds_mla_cache,
    ratios,
    run_all,
    stock,
)

TOKENS = (128, 256, 512, 1024, 2048, 8192)
CONTEXTS = (32_768, 131_072, 262_144)
_QUICK_TOKENS, _QUICK_CONTEXTS = (256, 2048), (131_072,)
AS_CACHED, WIDENED = "fp8_e4m3", "fp8_e4m3 widened"
#: How much slower the choice may be than the other way.
_TOLERATED = 0.05


def run(workbench: Workbench) -> Iterator[Row]:
    """Rows of every size; then where keys are widened, or are not, and the other way is faster."""
    device = workbench.device
    fp8, scale = random_cache("fp8_e4m3", device)
    bf16, _ = random_cache("bf16", device)
    packed, unpacked = random_ds_mla_cache(device, BLOCKS)
    mine: list[Row] = []
    for context in _QUICK_CONTEXTS if workbench.quick else CONTEXTS:
        for tokens in _QUICK_TOKENS if workbench.quick else TOKENS:
            chosen = select(tokens, context, device)
            of = partial(ours, workbench, selections=chosen)
            versions = {
                WIDENED: Version(of(fp8, scale, wide=_wide(chosen)), fp8, scale, HEAD_DIM),
                AS_CACHED: Version(of(fp8, scale), fp8, scale, HEAD_DIM),
                "bf16": Version(of(bf16, 1.0), bf16, 1.0, 2 * HEAD_DIM),
                "stock FLASHMLA_SPARSE fp8_ds_mla": Version(
                    stock(packed, chosen), unpacked, 1.0, DS_MLA_BYTES
                ),
            }
            demand = floor.attention(tokens, HEADS, TOPK // DCP, row_bytes=HEAD_DIM)
            for row in workbench.measure(
                partial(
                    Row,
                    "prefill",
                    f"{tokens:,} tokens of {context:,}, DCP {DCP}, {HEADS} heads",
                    sizes={"tokens": tokens, "context": context, "dcp": DCP, "heads": HEADS},
                ),
                {name: partial(problem_of, one, chosen) for name, one in versions.items()},
                {name: partial(run_all, one, chosen) for name, one in versions.items()},
                1,
                floor_us=workbench.floor_us(demand),
            ):
                mine.append(row)
                yield row
    workbench.remarks += [*ratios(mine), *where_wrong(mine)]


def select(tokens: int, context: int, device: torch.device) -> Selections:
    """Random choices of the tokens of one request."""
    width = context // DCP // BLOCK
    return Selections(
        [torch.randn(tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)],
        [torch.randint(context, (tokens, TOPK), dtype=torch.int32, device=device)],
        torch.randperm(BLOCKS, device=device)[:width].int()[None],
        torch.zeros(tokens, dtype=torch.int32, device=device),
    )


def _wide(selections: Selections) -> object:
    """All tokens attend a copy of the request's rows."""
    from ...backends.wide_metadata import WideChunk, WideStep

    table = selections.table
    width = table.shape[1]
    memory = torch.empty(width, BLOCK, HEAD_DIM, dtype=torch.bfloat16, device=table.device)
    owners = torch.zeros(width, dtype=torch.int32, device=table.device)
    tokens = slice(0, len(selections.request_of))
    return WideStep(memory, [WideChunk(tokens, table, owners, firsts=owners[:1])])


def where_wrong(rows: list[Row]) -> list[str]:
    """The sizes at which the choice is more than 5 % behind the other way."""
    times = {(row.shape, row.provider): row.us for row in rows if row.us is not None}
    said = []
    for row in rows:
        other = times.get((row.shape, WIDENED))
        if row.provider != AS_CACHED or row.us is None or other is None:
            continue
        tokens, local = int(row.sizes["tokens"]), int(row.sizes["context"]) // DCP
        chosen = widens(tokens, tokens * TOPK // DCP, local)
        taken, best = (other, row.us) if chosen else (row.us, other)
        if taken > (1 + _TOLERATED) * best:
            way = "widened" if chosen else "not widened"
            said.append(
                f"prefill, {row.shape}: {way}, {taken / best - 1:.0%} behind the other way."
            )
    return said
