"""The kernel that writes the key bounds of prefills' query rows.

Stock compiles its kernel for every class of its run-time arguments: 36 variants, 72 with PCP. A
rank that meets one which was not warmed compiles while the others wait in a collective. This one
is compiled for nothing that varies at run time: there is one variant per compress ratio.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.triton_utils import tl, triton

from ..compat.adapter import load_adapter
from .length_kernel import local_length

_BLOCK = 1024
_INT32_END = 1 << 31  # from here on Triton would type an argument i64: another variant

_CAPACITIES = ("num_rows", "num_keys")  # of the tensors written; a call does not name them
_INTEGERS = (
    "token_origin",
    "dcp_rank",
    "dcp_world",
    "interleave",
    *_CAPACITIES,
)
_POINTERS = (
    "query_start_loc_ptr",
    "seq_lens_ptr",
    "cu_seq_lens_ptr",
    "row_start_ptr",
    "token_to_seq_ptr",
    "key_start_ptr",
    "key_end_ptr",
)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_POINTERS
)
def _chunk_bounds_kernel(  # type: ignore[no-untyped-def]
    query_start_loc_ptr,
    seq_lens_ptr,
    cu_seq_lens_ptr,
    row_start_ptr,
    token_to_seq_ptr,
    key_start_ptr,
    key_end_ptr,
    token_origin,
    dcp_rank,
    dcp_world,
    interleave,
    num_rows,
    num_keys,
    BLOCK: tl.constexpr,  # noqa: N803
    COMPRESS_RATIO: tl.constexpr,  # noqa: N803
):
    request = tl.program_id(0)
    worker = tl.program_id(1)
    workers = tl.num_programs(1)
    offsets = tl.arange(0, BLOCK)

    first = tl.load(query_start_loc_ptr + request) - token_origin
    last = tl.load(query_start_loc_ptr + request + 1) - token_origin
    context = tl.load(seq_lens_ptr + request) - (last - first)
    row_start = tl.load(row_start_ptr + request)
    # Lengths are the device's here; the host allocated by its own, which may be others.
    stop = tl.minimum(last, num_rows)
    for base in range(first + worker * BLOCK, stop, workers * BLOCK):
        token = base + offsets
        mask = (token >= 0) & (token < stop)
        states = (context + token - first + 1) // COMPRESS_RATIO
        local = local_length(states, dcp_rank, dcp_world, interleave)
        tl.store(key_start_ptr + token, row_start, mask=mask)
        tl.store(key_end_ptr + token, row_start + local, mask=mask)

    key_begin = tl.load(cu_seq_lens_ptr + request)
    key_end = tl.minimum(tl.load(cu_seq_lens_ptr + request + 1), num_keys)
    for base in range(key_begin + worker * BLOCK, key_end, workers * BLOCK):
        key = base + offsets
        tl.store(token_to_seq_ptr + key, request, mask=key < key_end)


_STOCK: Any = load_adapter()


class ChunkBoundsKernel(_STOCK.TritonJitKernel):
    """The kernel as vLLM warms it: one compile key per compress ratio."""

    kernel = _chunk_bounds_kernel

    @dataclass(frozen=True)
    class CompileKey:
        """What a variant is compiled for."""

        compress_ratio: int

    def dispatch(self, *, compress_ratio: int) -> CompileKey:
        """The variant that serves a compress ratio."""
        return self.CompileKey(compress_ratio)

    def get_warmup_keys(self, compress_ratio: int) -> list[CompileKey]:
        """All variants of an engine: one."""
        return [self.dispatch(compress_ratio=compress_ratio)]

    def warmup_inputs(self, compile_key: CompileKey) -> dict[str, Any]:
        """Any inputs: nothing of them is part of the key."""
        pointer = _STOCK.TritonWarmupTensor(torch.int32)
        pointers = {name.removesuffix("_ptr"): pointer for name in _POINTERS}
        return {
            **pointers,
            **{name: 2 for name in _INTEGERS if name not in _CAPACITIES},
            "num_requests": 1,
            "workers": 1,
            "compress_ratio": compile_key.compress_ratio,
        }

    @_STOCK.kernel_launcher  # type: ignore[untyped-decorator]
    def __call__(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        cu_seq_lens: torch.Tensor,
        row_start: torch.Tensor,
        token_to_seq: torch.Tensor,
        key_start: torch.Tensor,
        key_end: torch.Tensor,
        token_origin: int,
        dcp_rank: int,
        dcp_world: int,
        interleave: int,
        *,
        num_requests: int,
        workers: int,
        compress_ratio: int,
    ) -> Any:
        """Writes the bounds of requests; all tensors int32, see :func:`reference_chunk_bounds`."""
        rows, keys = key_start.shape[0], token_to_seq.shape[0]
        if not max(token_origin + rows, keys, dcp_world * interleave) < _INT32_END:
            raise ValueError(
                f"a step of {rows} tokens from {token_origin} on, over {keys} keys, is past "
                f"{_INT32_END - 1}, the most that the chunk metadata counts; lower "
                "--max-num-batched-tokens"
            )
        return (num_requests, workers), {
            "num_rows": rows,
            "num_keys": keys,
            "BLOCK": _BLOCK,
            "COMPRESS_RATIO": compress_ratio,
        }


CHUNK_BOUNDS_KERNEL = ChunkBoundsKernel()


def write_chunk_bounds(**arguments: Any) -> None:
    """Launches the kernel with as many workers a request as there are blocks of rows or keys.

    The arguments are those of :func:`reference_chunk_bounds`.
    """
    longest = max(arguments[name].shape[0] for name in ("key_start", "token_to_seq"))
    workers = min(max(triton.cdiv(longest, _BLOCK), 1), 64)
    CHUNK_BOUNDS_KERNEL(**arguments, workers=workers)


def reference_chunk_bounds(
    *,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    row_start: torch.Tensor,
    token_to_seq: torch.Tensor,
    key_start: torch.Tensor,
    key_end: torch.Tensor,
    token_origin: int,
    dcp_rank: int,
    dcp_world: int,
    interleave: int,
    num_requests: int,
    compress_ratio: int,
) -> None:
    """The kernel in plain torch.

    Lengths on the device may be others than those that the host allocated by: what is outside the
    written tensors is left out, and what no request reaches stays as it is.

    Args:
        query_start_loc: ``[requests + 1]`` first query token of each request in the step.
        seq_lens: ``[requests]`` global lengths, query tokens included, not compressed.
        cu_seq_lens: ``[requests + 1]`` cumulative compressed lengths.
        row_start: ``[requests]`` (at least) first row of each request in the gathered keys.
        token_to_seq: ``[keys]``, written with the request of each key.
        key_start: ``[query rows]``, written with the first key row of a query row.
        key_end: the same, written with the end of its keys: what its rank stores of them.
        token_origin: the requests' first query token in the step.
        dcp_rank, dcp_world, interleave: whose shard the rows are bounded to.
        num_requests: of all tensors.
        compress_ratio: tokens a key stands for.
    """
    from .lengths import local_lengths

    tokens = torch.arange(key_start.shape[0], dtype=torch.int32)
    keys = torch.arange(token_to_seq.shape[0])
    for request in range(num_requests):
        first, last = (int(query_start_loc[request + i]) - token_origin for i in (0, 1))
        rows = (tokens >= first) & (tokens < last)
        context = int(seq_lens[request]) - (last - first)
        visible = context + 1 + tokens[rows] - first
        local = local_lengths(visible // compress_ratio, dcp_rank, dcp_world, interleave)
        key_start[rows] = row_start[request]
        key_end[rows] = row_start[request] + local
        key_begin, key_stop = (int(cu_seq_lens[request + i]) for i in (0, 1))
        token_to_seq[(keys >= key_begin) & (keys < key_stop)] = request
