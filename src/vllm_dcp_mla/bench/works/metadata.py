"""``build()`` of the sparse indexer's metadata: ours and stock's on the same batches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import torch

from ..engine import Batch, common_metadata, indexer_builder, wrong_rows
from ..rows import Row
from ..timing import HostStopwatch, QueuedStopwatch, Stopwatch, compare
from ..workbench import Workbench

PROVIDERS = ("vllm_dcp_mla", "stock")
_CONTEXT = 131_072
_LONG = 1_048_576
_STEP = 16_384
#: About 10 ms on an H200: longer than any build needs to be enqueued without waiting.
_BUSY_CYCLES = 20_000_000
_QUICK = ("decode, 64 requests", f"prefill, {_STEP:,} tokens of {_CONTEXT:,}")


def batches() -> list[Batch]:
    """Decodes, decodes that verify drafts, and the last step of a long prefill."""
    draw = random.Random(0)

    def lengths(requests: int) -> tuple[int, ...]:
        return tuple(_CONTEXT - draw.randrange(4096) for _ in range(requests))

    return [
        *(
            Batch(f"decode, {n} request{'s' * (n > 1)}", lengths(n), (1,) * n, n)
            for n in (1, 64, 512)
        ),
        Batch("MTP, 64 requests of 3 tokens", lengths(64), (3,) * 64, 64, drafts=2),
        Batch(f"prefill, {_STEP:,} tokens of {_CONTEXT:,}", (_CONTEXT,), (_STEP,), 0),
        Batch(f"prefill, {_STEP:,} tokens of {_LONG:,}", (_LONG,), (_STEP,), 0),
    ]


def run(workbench: Workbench) -> Iterator[Row]:
    """Rows of host time, and with a GPU of the time until it is done, of every batch."""
    on_gpu = workbench.device.type == "cuda"
    if not on_gpu:
        workbench.remarks.append(
            "metadata: on a CPU the host's part only; kernels are left out of it, for both."
        )
    mine: list[Row] = []
    for batch in batches():
        if workbench.quick and batch.name not in _QUICK:
            continue
        for row in at_batch(workbench, batch):
            mine.append(row)
            yield row
    workbench.remarks += ratios(mine)


def at_batch(workbench: Workbench, batch: Batch) -> list[Row]:
    """Rows of one batch."""
    device = workbench.device
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    measured: dict[str, Stopwatch] = {"host": HostStopwatch(wait)}
    if device.type == "cuda":
        measured["GPU until done"] = QueuedStopwatch(_BUSY_CYCLES)
    common = common_metadata(batch, device)
    rows: list[Row] = []
    with ExitStack() as stack:
        works: dict[str, Any] = {}
        for provider in PROVIDERS:
            builder = stack.enter_context(indexer_builder(provider, batch, device))
            works[provider] = partial(builder.build, 0, common)
        for provider, build in list(works.items()):
            problem = wrong_rows(build(), batch)
            if problem is not None:
                del works[provider]
                rows.append(_row(batch, "host", provider, problem=problem))
        if device.type != "cuda":
            stack.enter_context(_without_kernels())
        for what, stopwatch in measured.items():
            timings = compare(works, stopwatch, budget_us=workbench.budget_us)
            rows += [
                _row(batch, what, provider, us=timing.us, spread=timing.spread)
                for provider, timing in timings.items()
            ]
    return rows


def _row(batch: Batch, what: str, provider: str, **figures: Any) -> Row:
    return Row(
        "metadata",
        f"{batch.name}, {what}",
        provider,
        sizes={
            "requests": len(batch.seq_lens),
            "tokens": batch.tokens,
            "context": max(batch.seq_lens),
            "time": what,
        },
        **figures,
    )


def _without_kernels() -> Any:
    """Triton kernels are not launched: interpreted ones would be all that is measured."""
    from vllm.model_executor.warmup import jit_warmup_triton_helper as helper

    def launch(self: Any, spec: Any, inputs: Any) -> Any:
        return spec[2] if len(spec) == 3 else None

    return mock.patch.object(helper.VllmTritonJitKernel, "launch", launch)


def ratios(rows: list[Row]) -> list[str]:
    """Ours over stock's for every batch."""
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.us is not None:
            times.setdefault(row.shape, {})[row.provider] = row.us
    return [
        f"metadata, {shape}: {found[PROVIDERS[0]] / found[PROVIDERS[1]]:.2f} of stock's."
        for shape, found in times.items()
        if len(found) == len(PROVIDERS)
    ]
