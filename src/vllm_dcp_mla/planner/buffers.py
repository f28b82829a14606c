"""Bytes of the buffers beside weights and cache, as stock vLLM 0.33 allocates them: arithmetic.

Each function names its source below ``vllm/``.
"""

from __future__ import annotations

import math

from .model_spec import ModelSpec
from .workload import Workload

_INT32 = 4
_BF16 = 2
_MASK_BYTES = 128 << 20
_RADIX_TOPK_BYTES = 1 << 20
_TABLE_TOKENS = 128  # block tables are aligned to this many tokens
_CONTEXT_ROWS = 64 * 1024


def topk_buffer_bytes(spec: ModelSpec, w: Workload) -> int:
    """Chosen tokens of every row (``models/deepseek_v32/nvidia/model.py`` and ``mtp.py``)."""
    models = 1 + (spec.mtp_layers if w.spec_tokens else 0)
    return models * w.max_num_batched_tokens * spec.index_topk * _INT32


def index_group_bytes(spec: ModelSpec, w: Workload) -> int:
    """Physical rows of each group of layers that share a choice (``mla/index_group.py``)."""
    groups = len(spec.indexer_layers) + (spec.mtp_layers if w.spec_tokens else 0)
    return groups * (w.decode_rows + 1) * (spec.index_topk + 1) * _INT32


def mla_builders(spec: ModelSpec, w: Workload) -> int:
    """Metadata builders of MLA layers: leaders, followers, and those of the drafter."""
    return 1 + int(spec.shares_indices) + int(w.spec_tokens > 0)


def indexer_builders(w: Workload) -> int:
    """Metadata builders of indexers: the model's and the drafter's."""
    return 1 + int(w.spec_tokens > 0)


def block_table_width(w: Workload, dcp: int) -> int:
    """Blocks of a row of a block table (``v1/worker/block_table.py``)."""
    blocks = -(-w.max_model_len // (w.block_size * dcp))
    step = _TABLE_TOKENS // math.gcd(_TABLE_TOKENS, w.block_size)
    return -(-blocks // step) * step


def expanded_block_table_bytes(w: Workload, dcp: int) -> int:
    """The indexer's block table with a row a token (``mla/indexer.py``)."""
    return w.max_num_batched_tokens * block_table_width(w, dcp) * _INT32


def indexer_state_bytes(w: Workload, sms: int) -> int:
    """The other buffers of an indexer's builder (``mla/indexer.py``)."""
    tokens = w.max_num_batched_tokens
    ranges = max(w.max_num_seqs * w.decode_tokens, tokens) + w.decode_tokens
    return (5 * tokens + ranges + 2 * (sms + 1) + 1) * _INT32


def runner_block_table_bytes(w: Workload, dcp: int) -> int:
    """The runner's block tables, twice, and slot mapping (``v1/worker/gpu/block_table.py``)."""
    tables = 2 * w.max_num_seqs * block_table_width(w, dcp) * _INT32
    return tables + w.max_num_batched_tokens * 8


def context_rows(spec: ModelSpec, w: Workload, dcp: int, interleave: int = 1) -> int:
    """Rows in which dense prefill gathers its context (``sparse_mla_attention.py``)."""
    rows = min(
        max(8 * w.max_model_len, 4 * w.max_num_seqs * w.block_size),
        _CONTEXT_ROWS,
        w.max_num_seqs * spec.index_topk,
    )
    rows = max(rows, w.block_size)
    if dcp == 1:
        return rows
    step = math.lcm(w.block_size, dcp * interleave)
    return -(-rows // step) * step


def context_workspace_bytes(spec: ModelSpec, w: Workload, dcp: int) -> int:
    """The dense prefill's workspace of one MLA builder; DCP adds its own shard."""
    rows = context_rows(spec, w, dcp)
    if dcp > 1:
        rows += rows // dcp
    return rows * spec.cache_row_width * _BF16


def mask_workspace_bytes(spec: ModelSpec, arch: tuple[int, int], cache_format: str) -> int:
    """The top-k mask of one MLA builder, made under DCP too (``sparse_mla_attention.py``)."""
    dims = (
        *(spec.heads, spec.kv_lora_rank, spec.qk_nope_head_dim, spec.qk_rope_head_dim),
        spec.v_head_dim,
    )
    known = ((128, 512, 128, 64, 128), (64, 512, 192, 64, 256), (64, 512, 256, 0, 256))
    return _MASK_BYTES if arch[0] == 10 and cache_format == "bfloat16" and dims in known else 0


def indexer_gather_bytes(spec: ModelSpec, w: Workload, pcp: int, dcp: int) -> int:
    """Keys that the indexer gathers for prefills (``sparse_attn_indexer.py``, ``indexer.py``).

    PCP with DCP holds them three times: its own, the gathered ones, and those in token order.
    """
    rows = w.max_model_len * (576 * 2 // 132) * w.prefill_factor
    copies = 3 if pcp > 1 and dcp > 1 else 1
    scales = spec.index_row_bytes - spec.index_head_dim
    keys = _aligned(rows * spec.index_head_dim) + _aligned(rows * scales)
    return copies * keys + _RADIX_TOPK_BYTES


def flashmla_gather_bytes(
    spec: ModelSpec, w: Workload, heads_per_rank: int, tp: int, pcp: int, dcp: int
) -> int:
    """What FLASHMLA_SPARSE asks for with a packed cache (``mla/flashmla_sparse.py``)."""
    tokens, width = w.max_num_batched_tokens, spec.cache_row_width
    rows = w.prefill_factor * w.max_model_len
    both = pcp > 1 and dcp > 1
    shapes = [tokens * heads_per_rank * width, (rows // dcp if both else rows) * width]
    if both:
        shapes.append(rows * width)
    heads = heads_per_rank * tp if both and dcp > pcp else heads_per_rank
    padded = -(-heads // 64) * 64
    latent = spec.kv_lora_rank
    shapes += [tokens * padded * width, tokens * padded * latent, tokens * heads * latent]
    return sum(_aligned(numbers * _BF16) for numbers in shapes)


def symmetric_rows(w: Workload, largest_graph: int) -> int:
    """Rows of the direct exchanges (``get_dcp_workspace_max_num_tokens``)."""
    decode = max(w.max_num_seqs * w.decode_tokens, w.captured_tokens(largest_graph))
    return min(w.max_num_batched_tokens, decode)


def symmetric_output_bytes(rows: int, dcp: int, heads_per_rank: int, latent: int) -> int:
    """The direct exchange of partial outputs, ``a2a`` (``DirectDCPA2AWorkspace``)."""
    return 2 * dcp * rows * heads_per_rank * (latent * _BF16 + 4)


def symmetric_query_bytes(rows: int, gathered_heads: int, width: int, query_bytes: int) -> int:
    """The direct gather of queries (``DirectDCPQGatherWorkspace``)."""
    return rows * gathered_heads * width * query_bytes


def attention_transient_bytes(
    rows: int, gathered_heads: int, spec: ModelSpec, query_bytes: int, *, a2a: bool
) -> int:
    """What one layer holds at once: gathered queries, partial outputs, their exchange, choices."""
    outputs = gathered_heads * (spec.kv_lora_rank * _BF16 + 4)
    exchange = 2 * gathered_heads * (spec.kv_lora_rank + 2) * _BF16 if a2a else 0
    queries = gathered_heads * spec.cache_row_width * query_bytes
    return rows * (queries + outputs + exchange + spec.index_topk * _INT32)


def _aligned(size: int) -> int:
    return -(-size // 256) * 256
