"""What one rank's indexer chose for some queries of each prompt, kept on the GPU until the end.

Rows are found by request and position, so that engines can be compared that cut prompts apart in
different ways (chunks, PCP). Nothing here waits for the GPU. Decode steps that replay a CUDA graph
run no Python and leave nothing; those of a drafting engine are not kept.

Tensors are named ``prompt/layer/what/position``:

======== ====================================== ================================================
what     of                                     shape
======== ====================================== ================================================
selected each query                             ``[index_topk]`` int32 positions, -1 for none
hidden   a whole prompt, by its first position  ``[T, hidden]``, behind the input norm
======== ====================================== ================================================
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .requests import Recording

_LAYER = "layers."


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one request in a step.

    Attributes:
        prompt: number of the request.
        position: of the first token.
        start, stop: rows of the step's tensors.
    """

    prompt: int
    position: int
    start: int
    stop: int

    def row(self, position: int) -> int | None:
        """The row of a position, None where it is not among these tokens."""
        row = self.start + position - self.position
        return row if self.start <= row < self.stop else None


def spans_of(batch: Any) -> list[Span]:
    """A step's requests, of which a rank of PCP has several parts, from vLLM's ``InputBatch``."""
    bounds = batch.query_start_loc_np[: batch.num_reqs + 1].tolist()
    firsts = batch.num_computed_tokens_np[: batch.num_reqs].tolist()
    return [
        # vLLM hangs something of its own on a request's number.
        Span(int(name.partition("-")[0]), first, start, stop)
        for name, first, start, stop in zip(
            batch.req_ids, firsts, bounds[:-1], bounds[1:], strict=True
        )
        if stop > start
    ]


@dataclass(slots=True)
class Recorder:
    """Keeps what the hooks of :func:`install` see.

    Attributes:
        recording: what is kept.
        lengths: tokens of each prompt.
        layers: decoder layers; the MTP layer behind them is not kept.
        drafts: whether the engine drafts tokens.
        tensors: what was kept, by name.
    """

    recording: Recording
    lengths: Sequence[int]
    layers: int
    drafts: bool
    tensors: dict[str, Any] = field(default_factory=dict)
    _spans: list[Span] = field(default_factory=list)

    def begin(self, batch: Any) -> None:
        """A step's batch, vLLM's ``InputBatch``; of a rank of PCP the part that it computes."""
        self._spans = [
            span
            for span in spans_of(batch)
            if not self.drafts or span.position < self.lengths[span.prompt]
        ]

    def hidden(self, layer: int, hidden_states: Any) -> None:
        """A layer's input ``[T, hidden]``; what follows a prompt's end is no part of it."""
        for span in self._spans:
            if span.prompt in self.recording.whole and span.position < self.lengths[span.prompt]:
                rows = hidden_states[span.start : span.stop]
                self._keep(span.prompt, layer, "hidden", span.position, rows)

    def selection(self, layer: int, topk: Any) -> None:
        """What the indexer of a leader chose, ``[T, index_topk]``."""
        for span in self._spans:
            for position in self.recording.positions[span.prompt]:
                if (row := span.row(position)) is not None:
                    self._keep(span.prompt, layer, "selected", position, topk[row])

    def save(self, path: Path) -> None:
        """Writes everything as a safetensors file."""
        from safetensors.torch import save_file

        save_file({name: tensor.cpu().contiguous() for name, tensor in self.tensors.items()}, path)

    def _keep(self, prompt: int, layer: int, what: str, position: int, tensor: Any) -> None:
        if layer < self.layers:
            self.tensors[f"{prompt}/{layer}/{what}/{position}"] = tensor.clone()


def layer_of(name: str) -> int:
    """The number in a layer's name, as ``model.layers.3.self_attn.attn``."""
    return int(name.partition(_LAYER)[2].partition(".")[0])


def install(recorder: Recorder) -> None:
    """Hooks the recorder into vLLM in this process, once the engine is warm."""
    from vllm.forward_context import get_forward_context
    from vllm.models.deepseek_v32 import attention
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    layer_class = attention.DeepseekV32Attention
    stock_prepare, stock_forward = GPUModelRunner.prepare_attn, layer_class.forward
    stock_indexer = attention.sparse_attn_indexer

    @functools.wraps(stock_prepare)
    def prepare_attn(runner: Any, input_batch: Any) -> Any:
        recorder.begin(input_batch)
        return stock_prepare(runner, input_batch)

    @functools.wraps(stock_forward)
    def forward(layer: Any, positions: Any, hidden_states: Any) -> Any:
        recorder.hidden(layer_of(layer.layer_name), hidden_states)
        return stock_forward(layer, positions, hidden_states)

    @functools.wraps(stock_indexer)
    def sparse_attn_indexer(hidden_states: Any, prefix: Any, *args: Any, **kwargs: Any) -> Any:
        topk = stock_indexer(hidden_states, prefix, *args, **kwargs)
        if isinstance(get_forward_context().attn_metadata, dict):  # no step without requests
            recorder.selection(layer_of(prefix), topk)
        return topk

    runner_class: Any = GPUModelRunner
    runner_class.prepare_attn = prepare_attn
    layer_class.forward = forward
    attention.sparse_attn_indexer = sparse_attn_indexer
