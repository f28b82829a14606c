"""Which engines our indexer metadata is for, and which of its builds is running."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

from ..settings import load_settings

if TYPE_CHECKING:
    import torch

    from .chunks import ChunkBuild

#: ``model_type`` of the models of vllm.models.deepseek_v32, MTP drafters included.
MODEL_TYPES = frozenset({"deepseek_v32", "glm_moe_dsa", "deepseek_mtp"})


@dataclass(slots=True)
class Running:
    """A builder's build, while one runs: stock's ``build()`` then gets its chunks from us.

    Decodes come first in a batch. Where this rank stores no key of any of them, DeepGEMM is not
    asked for a schedule: releases of it read past lengths that are all zero.

    Attributes:
        splitter: :meth:`.builder.DcpIndexerBuilder.split_prefills`; weak: its builder holds this.
        no_work: ``[slots + 1, 2]`` int32, an empty DeepGEMM schedule.
        empty_requests: requests at the front that this rank stores no key of.
        empty_tokens: their query tokens.
        chunks: makes its prefill chunks; None before the first.
    """

    splitter: WeakMethod[Callable[..., list[tuple[slice, slice]]]]
    no_work: torch.Tensor
    empty_requests: int = 0
    empty_tokens: int = 0
    chunks: ChunkBuild | None = None
    _before: Token[Running | None] | None = None

    def __enter__(self) -> None:
        assert self._before is None, "a build of the indexer's metadata within itself"
        self._before = _running.set(self)

    def __exit__(self, *_: object) -> None:
        assert self._before is not None
        _running.reset(self._before)
        self._before = None
        self.chunks = None

    def split_prefills(self, *args: Any, **kwargs: Any) -> list[tuple[slice, slice]]:
        """See :meth:`.builder.DcpIndexerBuilder.split_prefills`."""
        split = self.splitter()
        assert split is not None  # the builder runs
        return split(*args, **kwargs)

    def schedules_nothing(self, context_lens: torch.Tensor) -> bool:
        """Whether all these decode rows are of requests that this rank stores no key of."""
        if not self.empty_requests:
            return False
        rows, next_n = context_lens.shape if context_lens.dim() == 2 else (len(context_lens), 1)
        return rows <= (self.empty_tokens if next_n == 1 else self.empty_requests)

    def chunk_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`.chunks.ChunkBuild.chunk_metadata`."""
        if self.chunks is None:
            from .chunks import ChunkBuild

            self.chunks = ChunkBuild()
        return self.chunks.chunk_metadata(*args, **kwargs)


_running: ContextVar[Running | None] = ContextVar("dcp_mla_indexer_build", default=None)


def serves(vllm_config: Any) -> bool:
    """Whether our indexer metadata is for an engine."""
    if vllm_config.parallel_config.decode_context_parallel_size == 1:
        return False
    model = vllm_config.model_config
    if model is None or getattr(model.hf_text_config, "model_type", None) not in MODEL_TYPES:
        return False
    return not load_settings(vllm_config.additional_config).disable


def running() -> Running | None:
    """The build of ours that this call is part of, if it is part of one."""
    return _running.get()
