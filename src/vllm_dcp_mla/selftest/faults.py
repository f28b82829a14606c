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
    "prefill-lse": "an LSE leaves for prefill rows too (with --pcp)",
    "lost-range": "of a context gathered in ranges, the first alone is attended (with --pcp)",
    "group-order": "shards are numbered as stock vLLM does (with --tp and --pcp, DCP over both)",
}
#: Those that show under PCP only, and the one that needs DCP to span TP too.
PCP_FAULTS = ("prefill-lse", "lost-range", "group-order")
SPANNING_FAULTS = ("group-order",)


@contextmanager
def planted(fault: str | None, backend: Any) -> Iterator[None]:
    """Plants a fault of :data:`FAULTS` in this process for a while; None plants nothing."""
    if fault is None:
        yield
        return
    plant = {
        "lse-base": _lse_base,
        "empty-row": _empty_row,
        "local-length": _local_length,
        "prefill-lse": _prefill_lse,
        "lost-range": _lost_range,
        "group-order": _group_order,
    }
    with plant[fault](backend):
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


def _prefill_lse(backend: Any) -> Any:
    impl = backend.get_impl_cls()
    right = impl.forward_mqa

    def wrong(*args: Any) -> Any:
        out, lse = right(*args)
        every = lse.new_zeros(len(out), lse.shape[1])
        every[: len(lse)] = lse
        return out, every

    return mock.patch.object(impl, "forward_mqa", wrong)


def _lost_range(backend: Any) -> Any:
    return mock.patch.object(backend.get_impl_cls(), "_merge_range")


def _group_order(backend: Any) -> Any:
    from vllm.distributed import parallel_state

    stock = parallel_state.init_model_parallel_group.__wrapped__
    return mock.patch.object(parallel_state, "init_model_parallel_group", stock)
