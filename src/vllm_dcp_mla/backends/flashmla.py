"""Stock's FlashMLA backend, whose constructor errors become reasons of selection."""

from __future__ import annotations

from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend

from .refusing import CapabilityTableMixin


class DcpFlashMLASparseBackend(CapabilityTableMixin, FlashMLASparseBackend):
    """Says no at once where stock says "valid" and raises ``NotImplementedError`` later."""
