"""Attention of one rank: our Triton kernel, FlashMLA and FA3, each as the backend launches it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from ...kernels import load_kernel
from ...kernels.base import LaunchBuffers, LaunchShape, SparseMlaBatch, SparseMlaKernel
from ...kernels.split import clear_empty_rows
from ...key_splits import arrival_bytes, partial_bytes
from ...settings import KernelName
from .. import check, floor, preferences
from ..inputs import CACHES, DIMS, TOPK, Cache, make_cache, make_sets, set_bytes, with_ragged_rows
from ..rows import Row
from ..timing import number_of_sets
from ..workbench import REFUSALS, Workbench

#: Query heads of a DCP group, GLM-5.2's, and keys of a token that a rank holds: 4 ranks, 1.
QUICK_SHAPES = ((64, 512), (64, 2048))
#: DeepSeek-V3.2's heads, too.
SHAPES = (*QUICK_SHAPES, (128, 512), (128, 2048))
#: The dispatch is chosen over what ranks hold at DCP 8 and 2, too, and for few heads, of TP8.
_ALL_SHAPES = (*SHAPES, (64, 256), (64, 1024), (16, 1024), (32, 1024), (32, 512))
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 4096, 8192)
_QUICK_TOKENS = (1, 16, 128, 1024)
KERNELS: tuple[KernelName, ...] = ("triton_decode", "flashmla", "flash_attn3")


def run(workbench: Workbench) -> Iterator[Row]:
    """Rows of every shape; then where the dispatch is behind, and the table that would not be."""
    tokens = _QUICK_TOKENS if workbench.quick else TOKENS
    shapes = QUICK_SHAPES if workbench.quick else _ALL_SHAPES
    mine = []
    for cache_name in CACHES:
        cache = make_cache(cache_name, workbench.device)
        for heads, rows in shapes:
            for number in tokens:
                for row in at_shape(workbench, "attention", cache, number, heads, rows):
                    mine.append(row)
                    yield row
        del cache
    workbench.remarks += preferences.where_behind(mine)
    if not workbench.quick:
        workbench.remarks += preferences.suggested(mine)


def at_shape(
    workbench: Workbench,
    work: str,
    cache: Cache,
    tokens: int,
    heads: int,
    rows: int,
    kernels: tuple[KernelName, ...] = KERNELS,
) -> list[Row]:
    """Rows of one shape, one for each kernel that takes it."""
    shape = LaunchShape(heads, TOPK, cache.rows.dtype, DIMS)
    name = next(n for n, dtype in CACHES.items() if dtype == cache.rows.dtype)
    found, absent = load_kernels(workbench, shape, rows, kernels)
    sets = make_batches(workbench, cache, tokens, heads, rows)
    buffers = make_buffers(workbench)
    demand = floor.attention(tokens, heads, rows, element_bytes=cache.rows.element_size())
    row = partial(
        Row,
        work,
        f"{tokens:,} tokens, {rows:,} rows, {heads} heads, {name}",
        sizes={"tokens": tokens, "rows": rows, "heads": heads, "cache": name},
    )
    rows_made = workbench.measure(
        row,
        {n: partial(checked, kernel, sets[0], buffers) for n, kernel in found.items()},
        {n: partial(launch_all, kernel, sets, buffers) for n, kernel in found.items()},
        len(sets),
        floor_us=workbench.floor_us(demand),
    )
    return [*rows_made, *(row(provider=n, note=why) for n, why in absent.items())]


def load_kernels(
    workbench: Workbench, shape: LaunchShape, rows: int, names: tuple[KernelName, ...] = KERNELS
) -> tuple[dict[str, SparseMlaKernel], dict[str, str]]:
    """The kernels that take a shape, and why others do not run; a refused dtype is no row."""
    found: dict[str, SparseMlaKernel] = {}
    absent: dict[str, str] = {}
    for name in names:
        try:
            kernel = load_kernel(name, num_sms=workbench.num_sms, rows=rows)
        except REFUSALS as error:
            absent[name] = f"not here: {error}"
            continue
        if kernel.supports(shape) is None:
            found[name] = kernel
    return found, absent


def make_batches(
    workbench: Workbench, cache: Cache, tokens: int, heads: int, rows: int
) -> list[SparseMlaBatch]:
    """Input sets that are larger together than the L2."""
    (one,) = make_sets(cache, tokens, heads, rows, 1)
    more = number_of_sets(set_bytes(one, rows), workbench.l2_bytes) - 1
    return [one, *make_sets(cache, tokens, heads, rows, more)]


def make_buffers(workbench: Workbench) -> LaunchBuffers:
    """Memory for split keys, as the backend holds it."""
    return LaunchBuffers(
        torch.zeros(
            partial_bytes(DIMS.kv_lora_rank, workbench.num_sms),
            dtype=torch.int8,
            device=workbench.device,
        ),
        torch.zeros(arrival_bytes(workbench.num_sms), dtype=torch.uint8, device=workbench.device),
    )


def launch(kernel: SparseMlaKernel, batch: SparseMlaBatch, buffers: LaunchBuffers) -> None:
    """One launch, and what the backend has to do after it."""
    kernel.launch(batch, buffers)
    if not kernel.clears_empty_rows:
        clear_empty_rows(batch.out, batch.lse, batch.counts)


def launch_all(kernel: SparseMlaKernel, sets: list[SparseMlaBatch], buffers: LaunchBuffers) -> None:
    """A pass."""
    for batch in sets:
        launch(kernel, batch, buffers)


def checked(kernel: SparseMlaKernel, batch: SparseMlaBatch, buffers: LaunchBuffers) -> str | None:
    """What is wrong with a kernel's result for rows of any length and for the shape as it is."""
    for tried in (with_ragged_rows(batch), batch):
        check.poison(tried)
        launch(kernel, tried, buffers)
        if (problem := check.problem_with(tried, kernel.lse_base)) is not None:
            return problem
    return None
