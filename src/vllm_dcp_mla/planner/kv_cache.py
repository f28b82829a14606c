"""Bytes of the KV cache, and what it holds: arithmetic only.

Two units, never mixed: a *rank's* tokens are rows of its own cache, *logical* tokens are those of
requests, whose rows lie on ``dcp`` ranks. Each rank stores every layer, whatever ``tp`` is, and
under DCP its share of the tokens of both caches: the MLA rows of all layers, and the keys of those
layers that have an indexer.
"""

from __future__ import annotations

from dataclasses import dataclass

from .model_spec import ModelSpec

#: Bytes of a row where they do not follow from its width (``MLAAttention.get_kv_cache_spec``).
PACKED_ROW_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}


def row_bytes(cache_format: str, width: int) -> int:
    """Bytes of a token in a layer's MLA cache.

    Args:
        cache_format: ``bfloat16``, ``fp8_e4m3``, ``fp8_ds_mla`` or ``nvfp4_ds_mla``.
        width: numbers of a row, 576 for the known models.
    """
    return PACKED_ROW_BYTES.get(cache_format) or width * (1 if cache_format == "fp8_e4m3" else 2)


@dataclass(frozen=True, slots=True)
class CacheRows:
    """What a token takes on the rank that stores it; under DCP both caches are sharded.

    Attributes:
        mla_layers: layers with an MLA row.
        mla_row_bytes: bytes of one.
        index_layers: layers with an indexer's key.
        index_row_bytes: bytes of one.
    """

    mla_layers: int
    mla_row_bytes: int
    index_layers: int
    index_row_bytes: int

    @property
    def bytes_per_token(self) -> int:
        """All layers together."""
        mla = self.mla_layers * self.mla_row_bytes
        return mla + self.index_layers * self.index_row_bytes


def cache_rows(spec: ModelSpec, mla_row_bytes: int, *, drafter: bool) -> CacheRows:
    """The rows of a model, with those of its MTP drafter or without."""
    extra = spec.mtp_layers if drafter else 0
    return CacheRows(
        mla_layers=spec.layers + extra,
        mla_row_bytes=mla_row_bytes,
        index_layers=len(spec.indexer_layers) + extra,
        index_row_bytes=spec.index_row_bytes,
    )


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """What a budget holds.

    Attributes:
        bytes_per_token: bytes of a token on the rank that stores it.
        budget_bytes: bytes of a rank; negative where nothing is left.
        block_size: tokens of a block on a rank.
        dcp: ranks that share the tokens of a request.
    """

    bytes_per_token: int
    budget_bytes: int
    block_size: int
    dcp: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a block on a rank."""
        return self.block_size * self.bytes_per_token

    @property
    def block_tokens(self) -> int:
        """Logical tokens that one block number stands for."""
        return self.block_size * self.dcp

    @property
    def blocks(self) -> int:
        """Blocks of a rank; every rank has the same number."""
        return max(self.budget_bytes, 0) // self.block_bytes

    @property
    def tokens_per_rank(self) -> int:
        """Rows of a rank's cache."""
        return self.blocks * self.block_size

    @property
    def tokens_logical(self) -> int:
        """Tokens of requests that all ranks hold together."""
        return self.blocks * self.block_tokens

    def blocks_per_request(self, tokens: int) -> int:
        """Blocks that a request of logical tokens takes (``FullAttentionSpec``)."""
        rows = -(-tokens // self.dcp)
        return -(-rows // self.block_size)

    def requests(self, tokens: int) -> float:
        """Requests of logical tokens that fit at once, as vLLM logs its maximum concurrency."""
        return self.blocks / self.blocks_per_request(tokens)

    def reported_tokens(self, max_model_len: int) -> int:
        """The tokens that vLLM logs as "GPU KV cache size"."""
        return int(self.requests(max_model_len) * max_model_len)


def gain(before: KvCapacity, after: KvCapacity) -> float | None:
    """How many times the logical tokens of ``before`` fit in ``after``; None from nothing."""
    return after.tokens_logical / before.tokens_logical if before.blocks else None
