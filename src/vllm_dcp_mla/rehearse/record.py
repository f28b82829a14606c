"""What one rank's indexer did for chosen queries of chosen prompts, kept on the GPU until the end.

Rows are found by request and position, so that engines can be compared that cut prompts apart in
different ways (chunks, PCP). Nothing here waits for the GPU. Decode steps that replay a CUDA graph
run no Python and leave nothing; those of a drafting engine are not kept.

Tensors are named ``prompt/layer/what/position``:

======== ========================================= ==============================================
what     of                                        shape
======== ========================================= ==============================================
selected each query                                ``[index_topk]`` int32 positions, -1 for none
bound    each query of a whole prompt              ``[1]``: keys that this rank scored
query    each query of a whole prompt              ``[index heads, dim]`` fp8, rotated
weights  each query of a whole prompt              ``[index heads]`` float32, with the query's scale
output   each query of a whole prompt              ``[heads of the rank * v_head_dim]``
hidden   a whole prompt, by its first position     ``[T, hidden]``, behind the input norm
index_k  a whole prompt, by its last position      ``[blocks, block bytes]`` of this rank's cache
======== ========================================= ==============================================
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
        entry: of it in the step's batch.
        position: of the first token.
        start, stop: rows of the step's tensors.
        end: of the request behind this step, on all ranks of PCP together.
    """

    prompt: int
    entry: int
    position: int
    start: int
    stop: int
    end: int

    def row(self, position: int) -> int | None:
        """The row of a position, None where it is not among these tokens."""
        row = self.start + position - self.position
        return row if self.start <= row < self.stop else None


def spans_of(batch: Any) -> list[Span]:
    """A step's requests, of which a rank of PCP has several parts, from vLLM's ``InputBatch``."""
    bounds = batch.query_start_loc_np[: batch.num_reqs + 1].tolist()
    firsts = batch.num_computed_tokens_np[: batch.num_reqs].tolist()
    # Of whole requests, where each rank of PCP computes parts.
    ends = None if batch.pcp is None else batch.pcp.global_seq_lens_cpu_upper_bound_np.tolist()
    spans = []
    for entry, (name, first) in enumerate(zip(batch.req_ids, firsts, strict=True)):
        start, stop = bounds[entry : entry + 2]
        if stop > start:
            # vLLM hangs something of its own on a request's number.
            prompt = int(name.partition("-")[0])
            end = first + stop - start if ends is None else ends[entry]
            spans.append(Span(prompt, entry, first, start, stop, end))
    return spans


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
        """A layer's input ``[T, hidden]``."""
        for span in self._whole():
            rows = hidden_states[span.start : span.stop]
            self._keep(span.prompt, layer, "hidden", span.position, rows)

    def selection(
        self, layer: int, topk: Any, q: Any, weights: Any, cache: Any, metadata: Any
    ) -> None:
        """What an indexer gave, and what it had.

        Args:
            layer: the leader.
            topk: ``[T, index_topk]``.
            q: ``[T, index heads, dim]`` fp8.
            weights: ``[T, index heads]``.
            cache: ``[blocks, block, bytes]``.
            metadata: vLLM's ``DeepseekV32IndexerMetadata``.
        """
        for span, position, row in self._queries():
            self._keep(span.prompt, layer, "selected", position, topk[row])
            if span.prompt in self.recording.whole:
                self._keep(span.prompt, layer, "query", position, q[row])
                self._keep(span.prompt, layer, "weights", position, weights[row])
                if (bound := _bound(metadata, row)) is not None:
                    self._keep(span.prompt, layer, "bound", position, bound)
        for span in self._whole():
            length = self.lengths[span.prompt]
            if span.end >= length:  # all keys are in the cache now
                blocks = metadata.block_table[span.entry, : -(-length // cache.shape[1])]
                kept = cache.index_select(0, blocks).flatten(1)
                self._keep(span.prompt, layer, "index_k", length - 1, kept)

    def output(self, layer: int, output: Any) -> None:
        """Attention's output ``[T, heads * v_head_dim]``."""
        for span, position, row in self._queries():
            if span.prompt in self.recording.whole:
                self._keep(span.prompt, layer, "output", position, output[row])

    def save(self, path: Path) -> None:
        """Writes everything as a safetensors file."""
        from safetensors.torch import save_file

        save_file({name: tensor.cpu().contiguous() for name, tensor in self.tensors.items()}, path)

    def _whole(self) -> list[Span]:
        """Parts of whole prompts; what follows a prompt's end is not one."""
        return [
            span
            for span in self._spans
            if span.prompt in self.recording.whole and span.position < self.lengths[span.prompt]
        ]

    def _queries(self) -> list[tuple[Span, int, int]]:
        """Each kept position among this step's, and its row."""
        return [
            (span, position, row)
            for span in self._spans
            for position in self.recording.positions[span.prompt]
            if (row := span.row(position)) is not None
        ]

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
    stock_attention = layer_class._sparse_indexer_and_attn

    @functools.wraps(stock_prepare)
    def prepare_attn(runner: Any, input_batch: Any) -> Any:
        recorder.begin(input_batch)
        return stock_prepare(runner, input_batch)

    @functools.wraps(stock_forward)
    def forward(layer: Any, positions: Any, hidden_states: Any) -> Any:
        recorder.hidden(layer_of(layer.layer_name), hidden_states)
        return stock_forward(layer, positions, hidden_states)

    @functools.wraps(stock_indexer)
    def sparse_attn_indexer(
        hidden_states: Any,
        prefix: Any,
        cache: Any,
        q: Any,
        q_scale: Any,
        k: Any,
        weights: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        topk = stock_indexer(hidden_states, prefix, cache, q, q_scale, k, weights, *args, **kwargs)
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, dict):
            recorder.selection(layer_of(prefix), topk, q, weights, cache, metadata[prefix])
        return topk

    @functools.wraps(stock_attention)
    def sparse_indexer_and_attn(layer: Any, *args: Any) -> None:
        stock_attention(layer, *args)
        recorder.output(layer_of(layer.layer_name), args[-1])

    runner_class: Any = GPUModelRunner
    runner_class.prepare_attn = prepare_attn
    layer_class.forward = forward
    layer_class._sparse_indexer_and_attn = sparse_indexer_and_attn
    attention.sparse_attn_indexer = sparse_attn_indexer


def _bound(metadata: Any, row: int) -> Any:
    """``[1]``: keys scored for a row; None where a decode step has several rows a request."""
    if row < metadata.num_decode_tokens:
        lengths = metadata.decode.seq_lens.view(-1)
        return lengths[row : row + 1] if len(lengths) >= metadata.num_decode_tokens else None
    for chunk in metadata.prefill.chunks:
        if chunk.token_start <= row < chunk.token_end:
            at = slice(row - chunk.token_start, row - chunk.token_start + 1)
            return chunk.cu_seqlen_ke[at] - chunk.cu_seqlen_ks[at]
    return None
