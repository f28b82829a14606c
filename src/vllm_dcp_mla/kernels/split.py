"""Launches of bounded size, and rows that hold nothing."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..workspace import WorkspacePlan
from .base import LaunchBuffers, SparseMlaBatch, SparseMlaKernel


def launch_split(
    kernel: SparseMlaKernel, batch: SparseMlaBatch, buffers: LaunchBuffers, plan: WorkspacePlan
) -> None:
    """Attends a whole batch in launches that fit the workspace.

    Tokens are independent, so that this is exact; results are written in place. Rows without tokens
    come out as (0, -inf), the identity of the merge, whatever the kernel left there.
    """
    if batch.dims.is_nope:
        # The NoPE kernel forbids empty rows: point them at one row, and clear them afterwards.
        batch.topk[:, 0].clamp_min_(0)
        launched = replace(batch, counts=batch.counts.clamp_min(1))
    else:
        launched = batch
    launches = plan.launches(batch.query.shape[0])
    for rows in launches:
        # A decode step is one launch: spare it the views.
        kernel.launch(launched if len(launches) == 1 else launched.tokens(rows), buffers)
    clear_empty_rows(batch.out, batch.lse, batch.counts)


def clear_empty_rows(out: torch.Tensor, lse: torch.Tensor | None, counts: torch.Tensor) -> None:
    """Sets rows whose count is 0 to (0, -inf), in place.

    Args:
        out: ``[T, H, V]``.
        lse: ``[T, H]``, or None.
        counts: ``[T]`` int32.
    """
    empty = counts == 0
    out.masked_fill_(empty[:, None, None], 0.0)
    if lse is not None:
        lse.masked_fill_(empty[:, None], float("-inf"))
