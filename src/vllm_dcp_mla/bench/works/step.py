"""One layer's step on a Hopper rank: index conversion, kernel, LSE and what the merge sends.

Ours is this package's implementation, stock's is vLLM's FLASHMLA_SPARSE, the only one of its
classes that serves DCP on Hopper; both run their own ``forward_mqa`` code. The packing for the
all-to-all is vLLM's in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from ...kernels.base import LaunchShape
from .. import check, floor
from ..counting import profiled_launches
from ..inputs import CACHES, DIMS, HEAD_DIM, TOPK
from ..rows import Row
from ..timing import number_of_sets
from ..workbench import Workbench
from .attention import make_buffers

BLOCK = 64
_CONTEXT = 131_072
DCP = 4
HEADS = 64
BLOCKS = 16_384  # of the cache, 1,048,576 rows
_SCALE = (DIMS.qk_nope_head_dim + DIMS.qk_rope_head_dim) ** -0.5
TOKENS = (1, 4, 16, 64, 256, 1024)
_QUICK_TOKENS = (1, 64)
#: vLLM's fp8_ds_mla row: 512 float8_e4m3fn, 4 float32 scales, 64 bf16.
DS_MLA_BYTES = 656
_SCALED = 128  # elements that share a scale


@dataclass(frozen=True, slots=True)
class Selections:
    """What the indexer chose, and where the cache's blocks are."""

    queries: list[torch.Tensor]
    topk: list[torch.Tensor]
    table: torch.Tensor
    request_of: torch.Tensor


@dataclass(frozen=True, slots=True)
class Version:
    """A way to do the step.

    Attributes:
        attend: ``(query, topk) -> (out, lse)``, the LSE in base e.
        rows: ``[R, 576]`` float64-able rows that it attends, for the reference.
        scale: value of one unit of ``rows``.
        row_bytes: bytes it reads of a row.
    """

    attend: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    rows: torch.Tensor
    scale: float
    row_bytes: int


def run(workbench: Workbench) -> Iterator[Row]:
    """Rows of ours from both caches and of stock's from its own."""
    device = workbench.device
    caches = {name: random_cache(name, device) for name in CACHES}
    packed, unpacked = random_ds_mla_cache(device, BLOCKS)
    mine: list[Row] = []
    for tokens in _QUICK_TOKENS if workbench.quick else TOKENS:
        one = _select(tokens, 1, device)
        touched = tokens * (TOPK // DCP * HEAD_DIM * 2 + HEADS * (HEAD_DIM + 512) * 2)
        sets = number_of_sets(touched, workbench.l2_bytes)
        selections = one if sets == 1 else _select(tokens, sets, device)
        versions = {
            f"vllm_dcp_mla {name}": Version(
                ours(workbench, cache, scale, selections), cache, scale, HEAD_DIM * cache.itemsize
            )
            for name, (cache, scale) in caches.items()
        }
        versions["stock FLASHMLA_SPARSE fp8_ds_mla"] = Version(
            stock(packed, selections), unpacked, 1.0, DS_MLA_BYTES
        )
        for row in _at_tokens(workbench, tokens, selections, versions):
            mine.append(row)
            yield row
    workbench.remarks += ratios(mine)


def _at_tokens(
    workbench: Workbench, tokens: int, selections: Selections, versions: dict[str, Version]
) -> list[Row]:
    made = []
    row = partial(
        Row,
        "step",
        f"{tokens:,} tokens, DCP {DCP}, {HEADS} heads, {_CONTEXT:,} of context",
        sizes={"tokens": tokens, "dcp": DCP, "heads": HEADS, "context": _CONTEXT},
    )
    rows = workbench.measure(
        row,
        {name: partial(problem_of, version, selections) for name, version in versions.items()},
        {name: partial(run_all, version, selections) for name, version in versions.items()},
        len(selections.queries),
    )
    for timed in rows:
        version = versions[timed.provider]
        demand = floor.attention(tokens, HEADS, TOPK // DCP, row_bytes=version.row_bytes)
        counted = {}
        if timed.us is not None:
            once = partial(_step, version, selections.queries[0], selections.topk[0])
            counted = {"launches": float(profiled_launches(once))}
        made.append(
            Row(
                timed.work, timed.shape, timed.provider, timed.us, timed.spread,
                workbench.floor_us(demand), timed.sizes, counted, timed.problem, timed.note,
            )
        )  # fmt: skip
    return made


def _step(version: Version, query: torch.Tensor, topk: torch.Tensor) -> torch.Tensor:
    out, lse = version.attend(query, topk)
    return pack_for_exchange(out, lse)


def pack_for_exchange(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """vLLM's packing of out and LSE for the all-to-all, ``[dcp, T, H / dcp, 514]``."""
    from vllm.v1.attention.ops import dcp

    tokens, heads, dim = out.shape
    extra = dcp._dcp_a2a_lse_pack_dim(out.dtype)
    per_rank = heads // DCP
    send = torch.empty((DCP, tokens, per_rank, dim + extra), dtype=out.dtype, device=out.device)
    dcp._dcp_a2a_pack_send(out, lse, send, DCP, per_rank, dim, extra)
    return send


def run_all(version: Version, selections: Selections) -> None:
    """A pass: every set of inputs once."""
    for query, topk in zip(selections.queries, selections.topk, strict=True):
        _step(version, query, topk)


def problem_of(version: Version, selections: Selections) -> str | None:
    """What is wrong with a version's out and LSE; those of the first set, some tokens."""
    query, topk = selections.queries[0], selections.topk[0].clone()
    if len(query) > 1:
        # A token whose keys are all on other ranks.
        topk[len(query) // 2] = torch.where(topk[0] % DCP == 0, topk[0] + 1, topk[0])
    out, lse = version.attend(query, topk)
    tokens = check.sampled_tokens(len(query), query.device)
    wanted = reference(query, topk, selections, version.rows, version.scale, tokens)
    return check.problem_of(out[tokens], lse[tokens], *wanted, "e")


def reference(
    query: torch.Tensor,
    topk: torch.Tensor,
    selections: Selections,
    rows: torch.Tensor,
    scale: float,
    tokens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of some tokens over the keys of rank 0, in float64.

    Args:
        query: ``[T, H, 576]``.
        topk: ``[T, K]`` positions in the whole context.
        selections: where the keys of each token's request are.
        rows: ``[R, 576]`` of this rank's cache.
        scale: value of one unit of ``rows``.
        tokens: which.
    """
    outs, lses = [], []
    for token in tokens.tolist():
        positions = topk[token].long()
        local = positions[positions % DCP == 0] // DCP
        blocks = selections.table[selections.request_of[token]]
        at = blocks[local // BLOCK].long() * BLOCK + local % BLOCK
        keys = rows[at].double() * scale
        scores = query[token].double() @ keys.T * _SCALE
        lses.append(torch.logsumexp(scores, -1))
        outs.append(torch.softmax(scores, -1) @ keys[:, : DIMS.kv_lora_rank])
    return torch.stack(outs), torch.stack(lses)


def ours(
    workbench: Workbench,
    cache: torch.Tensor,
    scale: float,
    selections: Selections,
    wide: Any = None,
) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """This package's Hopper implementation, without the engine that makes it.

    Args:
        workbench: the machine.
        cache: ``[R, 576]`` of a dtype of :data:`CACHES`.
        scale: value of one unit of it.
        selections: whose requests are served.
        wide: the step's :class:`...backends.wide_metadata.WideStep`, or None.
    """
    from ...backends.hopper import DcpFlashAttnMLASparseImpl
    from ...backends.hopper_kernels import KernelTable

    impl: Any = object.__new__(DcpFlashAttnMLASparseImpl)
    impl._shape = LaunchShape(HEADS, TOPK, cache.dtype, DIMS)
    impl._rows = TOPK // DCP
    impl._kernels = KernelTable(impl._shape, "auto", workbench.num_sms)
    impl._buffers = make_buffers(workbench)
    impl.scale = _SCALE
    return _attend(impl, cache.view(-1, BLOCK, HEAD_DIM), _metadata(selections, wide), scale)


def stock(
    cache: torch.Tensor, selections: Selections
) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """vLLM's FLASHMLA_SPARSE on its fp8_ds_mla cache, without the engine that makes it."""
    from vllm.v1.attention.backends.mla import flashmla_sparse as stock_module
    from vllm.v1.attention.ops.flashmla import get_mla_metadata

    cls: Any = stock_module.FlashMLASparseImpl
    impl: Any = object.__new__(cls)
    impl.softmax_scale = _SCALE
    impl.fp8_decode_padded_heads = cls._compute_fp8_decode_padded_heads(HEADS)
    device = cache.device
    scheduler, _ = get_mla_metadata()
    kernel = stock_module.FlashMLASparseMetadata.FP8KernelMetadata(
        scheduler_metadata=scheduler,
        cache_lens=torch.tensor([_CONTEXT], dtype=torch.int32, device=device),
        dummy_block_table=torch.empty((1, 1), dtype=torch.int32, device=device),
    )
    metadata = _metadata(selections)
    metadata.fp8_extra_metadata = kernel
    impl.need_to_return_lse_for_decode = True
    impl.dcp_world_size, impl.dcp_rank = DCP, 0

    def attend(query: torch.Tensor, topk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = impl._forward_fp8_kv_mixed_batch(query, cache, topk, metadata)
        return out, lse

    return attend


def _attend(
    impl: Any, cache: torch.Tensor, metadata: Any, scale: float
) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    layer = SimpleNamespace(_k_scale_float=scale)
    impl.index_group = None
    impl.need_to_return_lse_for_decode = True
    impl.dcp_world_size, impl.dcp_rank = DCP, 0

    def attend(query: torch.Tensor, topk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        impl.topk_indices_buffer = topk
        out, lse = impl.forward_mqa(query, cache, metadata, layer)
        return out, lse

    return attend


def _metadata(selections: Selections, wide: Any = None) -> Any:
    tokens = len(selections.request_of)
    return SimpleNamespace(
        num_decode_tokens=tokens,
        num_actual_tokens=tokens,
        block_size=BLOCK,
        req_id_per_token=selections.request_of,
        block_table=selections.table,
        cp_kv_cache_interleave_size=1,
        wide=wide,
        gather=None,  # only PCP gathers keys
    )


def _select(tokens: int, sets: int, device: torch.device) -> Selections:
    width = _CONTEXT // DCP // BLOCK
    return Selections(
        queries=[
            torch.randn(tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
            for _ in range(sets)
        ],
        topk=[
            torch.randint(_CONTEXT, (tokens, TOPK), dtype=torch.int32, device=device)
            for _ in range(sets)
        ],
        table=torch.randint(BLOCKS, (tokens, width), dtype=torch.int32, device=device),
        request_of=torch.arange(tokens, dtype=torch.int32, device=device),
    )


def random_cache(name: str, device: torch.device) -> tuple[torch.Tensor, float]:
    """``[BLOCKS * 64, 576]`` of a dtype of :data:`CACHES`, and the value of one unit of it."""
    scale = 1.0 if name == "bf16" else 0.25
    rows = torch.empty(BLOCKS * BLOCK, HEAD_DIM, dtype=CACHES[name], device=device)
    for start in range(0, len(rows), 1 << 16):
        part = rows[start : start + (1 << 16)]
        part.copy_((torch.randn(part.shape, device=device) / scale).to(rows.dtype))
    return rows, scale


def random_ds_mla_cache(device: torch.device, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A random fp8_ds_mla cache and what it holds.

    Returns:
        ``[blocks, 64, 656]`` uint8, and ``[blocks * 64, 576]`` bf16 rows whose values are exact in
        both: scales are powers of 2.
    """
    latent_dim = DIMS.kv_lora_rank
    count = blocks * BLOCK
    packed = torch.empty(count, DS_MLA_BYTES, dtype=torch.uint8, device=device)
    rows = torch.empty(count, HEAD_DIM, dtype=torch.bfloat16, device=device)
    step = 1 << 16
    for start in range(0, count, step):
        part = slice(start, min(start + step, count))
        n = part.stop - part.start
        values = torch.randn(n, latent_dim, device=device).to(torch.float8_e4m3fn)
        scales = torch.exp2(torch.randint(-2, 2, (n, latent_dim // _SCALED), device=device).float())
        rotary = torch.randn(n, DIMS.qk_rope_head_dim, device=device).bfloat16()
        packed[part, :latent_dim] = values.view(torch.uint8)
        packed[part, latent_dim : latent_dim + 16] = scales.view(torch.uint8)
        packed[part, latent_dim + 16 :] = rotary.view(torch.uint8)
        latent = values.float() * scales.repeat_interleave(_SCALED, dim=1)
        rows[part, :latent_dim] = latent.bfloat16()
        rows[part, latent_dim:] = rotary
    return packed.view(blocks, BLOCK, DS_MLA_BYTES), rows


def ratios(rows: list[Row]) -> list[str]:
    """Ours over stock's at every number of tokens."""
    by_shape: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.us is not None:
            by_shape.setdefault(row.shape, {})[row.provider] = row.us
    said = []
    for shape, timed in by_shape.items():
        stocks = next((us for name, us in timed.items() if name.startswith("stock")), None)
        if stocks is not None:
            parts = [
                f"{name} {us / stocks:.2f}"
                for name, us in timed.items()
                if not name.startswith("stock")
            ]
            said.append(f"step, {shape}, over stock's: {', '.join(parts)}.")
    return said
