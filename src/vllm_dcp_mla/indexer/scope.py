"""Which engines our indexer metadata is for, and which of its builds is running."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..settings import load_settings

if TYPE_CHECKING:
    import torch

    from .chunks import ChunkBuild

#: ``model_type`` of the models of vllm.models.deepseek_v32, MTP drafters included.
MODEL_TYPES = frozenset({"deepseek_v32", "glm_moe_dsa", "deepseek_mtp"})


@dataclass(slots=True)
class Running:
    """One of our builds.

    Attributes:
        split_prefills: see :meth:`.builder.DcpIndexerBuilder.split_prefills`.
        chunks: makes its prefill chunks.
        no_work: ``[slots + 1, 2]`` int32, an empty DeepGEMM schedule.
        empty_requests: requests at the front that this rank stores no key of.
        empty_tokens: their query tokens.
    """

    split_prefills: Callable[..., list[tuple[slice, slice]]]
    chunks: ChunkBuild
    no_work: torch.Tensor
    empty_requests: int
    empty_tokens: int

    def schedules_nothing(self, context_lens: torch.Tensor) -> bool:
        """Whether all these decode rows are of requests that this rank stores no key of."""
        rows, next_n = context_lens.shape if context_lens.dim() == 2 else (len(context_lens), 1)
        return rows <= (self.empty_tokens if next_n == 1 else self.empty_requests)


_running: ContextVar[Running | None] = ContextVar("dcp_mla_indexer_build", default=None)


def serves(vllm_config: Any) -> bool:
    """Whether our indexer metadata is for an engine."""
    if vllm_config.parallel_config.decode_context_parallel_size == 1:
        return False
    model = vllm_config.model_config
    if model is None or getattr(model.hf_text_config, "model_type", None) not in MODEL_TYPES:
        return False
    return not load_settings(vllm_config.additional_config).disable


@contextmanager
def building(
    split_prefills: Callable[..., list[tuple[slice, slice]]],
    no_work: torch.Tensor,
    empty_requests: int,
    empty_tokens: int,
) -> Iterator[None]:
    """While it runs, stock's ``build()`` gets its chunks from us.

    Decodes come first in a batch. Where this rank stores no key of any of them, DeepGEMM is not
    asked for a schedule: releases of it read past lengths that are all zero.

    Args:
        split_prefills: the builder's.
        no_work: ``[slots + 1, 2]`` int32, an empty DeepGEMM schedule.
        empty_requests: requests at the front that this rank stores no key of.
        empty_tokens: their query tokens.
    """
    from .chunks import ChunkBuild

    running = Running(split_prefills, ChunkBuild(), no_work, empty_requests, empty_tokens)
    token = _running.set(running)
    try:
        yield
    finally:
        _running.reset(token)


def running() -> Running | None:
    """The build of ours that this call is part of, if it is part of one."""
    return _running.get()
