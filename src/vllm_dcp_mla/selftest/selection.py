"""The indexer's choice of keys under DCP: our metadata builder, everything else in plain torch.

Each rank scores the keys it stores up to the bound that the builder gives a row and keeps its best;
the ranks choose among what they exchange, as vLLM does with kernels that need a GPU. With PCP that
is so for decode rows; a prefill row sees all keys, up to a bound that counts all of them.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from .batch import Batch, Shape
from .observe import Builds
from .partition import Rows


def select_keys(
    group: Any, config: Any, shape: Shape, batch: Batch, rows: Rows, builds: Builds
) -> torch.Tensor:
    """The positions each token attends, ``[T, topk]`` int32, -1 behind the last one.

    Args:
        group: vLLM's DCP group.
        config: the engine's configuration.
        shape: the batch's shape.
        batch: the batch, whole.
        rows: this rank's rows.
        builds: notes what happens inside the metadata build.
    """
    device = rows.common.seq_lens.device
    tokens = [token for token in rows.tokens.tolist() if token < shape.num_tokens]
    common = rows.common.replace(num_actual_tokens=len(tokens))
    builder = _make_builder(config, shape, common)
    with builds.watch(device):
        metadata = builder.build(0, common)
    bounds = _row_bounds(metadata, len(tokens))
    alone = metadata.num_decode_tokens if builder.use_pcp else len(tokens)
    rank, dcp, interleave = group.rank_in_group, group.world_size, shape.interleave
    best = torch.full((len(tokens), shape.topk, 2), float("-inf"))
    for row, token in enumerate(tokens):
        keys = torch.arange(int(bounds[row]))
        if row < alone:
            keys = (keys // interleave * dcp + rank) * interleave + keys % interleave
        # A bound that is too large names keys past the request's end: they have no score.
        scores = batch.scores[batch.token_request[token]]
        keys = keys[keys < len(scores)]
        kept = scores[keys].topk(min(shape.topk, len(keys)))
        best[row, : len(kept.indices), 0] = kept.values
        best[row, : len(kept.indices), 1] = keys[kept.indices].float()
    candidates = best
    if alone:
        candidates = torch.full((len(tokens), shape.topk * dcp, 2), float("-inf"))
        candidates[:, : shape.topk] = best
        candidates[:alone] = group.all_gather(best[:alone], dim=1)
    chosen = candidates[..., 0].topk(shape.topk, dim=1)
    positions = candidates[..., 1].gather(1, chosen.indices)
    topk = torch.full((len(rows.tokens), shape.topk), -1, dtype=torch.int32)
    topk[: len(tokens)] = torch.where(chosen.values.isinf(), -1.0, positions).int()
    return topk.to(device)


def _make_builder(config: Any, shape: Shape, common: Any) -> Any:
    from vllm.v1.attention.backends.mla import indexer
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    from ..indexer.builder import DcpIndexerBuilder

    spec = MLAAttentionSpec(
        block_size=shape.block_size, num_kv_heads=1, head_size=128, dtype=torch.uint8
    )
    width = common.block_table_tensor.shape[1]
    with mock.patch.object(indexer, "num_compute_units", return_value=1):
        builder = DcpIndexerBuilder(
            spec, ["indexer"], config, common.seq_lens.device, block_table_width=width
        )
    # As in an engine that drafts as many tokens as the batch's decodes have.
    builder.decode_threshold = max([1, *shape.query_lens[: shape.num_decodes]])
    builder.num_speculative_tokens = builder.decode_threshold - 1
    builder.use_flattening = builder.num_speculative_tokens > 0
    return builder


def _row_bounds(metadata: Any, num_tokens: int) -> torch.Tensor:
    """How many of this rank's keys each query row may see, ``[num_tokens]``."""
    bounds = torch.full((num_tokens,), -1)
    if metadata.decode is not None:
        bounds[: metadata.num_decode_tokens] = metadata.decode.seq_lens.reshape(-1).cpu()
    if metadata.prefill is not None:
        for chunk in metadata.prefill.chunks:
            rows = slice(chunk.token_start, chunk.token_end)
            bounds[rows] = (chunk.cu_seqlen_ke - chunk.cu_seqlen_ks).cpu()
    assert bool((bounds >= 0).all()), "a row without bounds"
    return bounds
