"""Planted faults: a check that cannot fail shows nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

#: Name on the command line: what it does.
FAULTS = {
    "lse-base": "the LSE is handed over in the other base",
    "empty-row": "rows without local tokens leave with LSE 0 instead of -inf",
    "local-length": "the indexer counts a rank's tokens by the wrong interleave",
}


@contextmanager
def planted(fault: str | None, backend: Any) -> Iterator[None]:
    """Plants a fault of :data:`FAULTS` in this process for a while; None plants nothing."""
    if fault is None:
        yield
        return
    with {"lse-base": _lse_base, "empty-row": _empty_row, "local-length": _local_length}[fault](
        backend
    ):
        yield


def _lse_base(backend: Any) -> Any:
    impl = backend.get_impl_cls()
    right = impl.forward_mqa

    def wrong(*args: Any) -> Any:
        out, lse = right(*args)
        return out, lse * math.log(2.0)

    return mock.patch.object(impl, "forward_mqa", wrong)


def _empty_row(backend: Any) -> Any:
    impl = backend.get_impl_cls()
    right = impl.forward_mqa

    def wrong(*args: Any) -> Any:
        out, lse = right(*args)
        return out, lse.masked_fill(lse.isneginf(), 0.0)

    return mock.patch.object(impl, "forward_mqa", wrong)


def _local_length(backend: Any) -> Any:
    from ..indexer.builder import DcpIndexerBuilder

    right = DcpIndexerBuilder.build

    def wrong(builder: Any, *args: Any) -> Any:
        other = 64 if builder.cp_kv_cache_interleave_size == 1 else 1
        builder.cp_kv_cache_interleave_size = builder.compressed_cp_interleave_size = other
        return right(builder, *args)

    return mock.patch.object(DcpIndexerBuilder, "build", wrong)
