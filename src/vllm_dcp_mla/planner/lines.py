"""Every allocation of a rank, with this package and with stock vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from ..capability import FLASH_ATTN_3, FLASH_ATTN_4, FLASHINFER, FLASHMLA, Deployment, row
from ..gather_plan import plan_gather
from ..indexer.exchange import exchange_bytes, max_rows
from ..key_splits import partial_bytes
from ..settings import Settings
from ..workspace import WorkspacePlan, counter_bytes, softmax_stats_bytes, stock_workspace_bytes
from . import buffers, estimates
from .estimates import Estimate
from .model_spec import ModelSpec
from .weights import Kind
from .workload import Workload

#: Ranks of one NVLink domain; vLLM's direct exchanges span no more.
_NODE = 8
_LARGEST_GRAPH = {10: 1024}
_OTHER_LARGEST_GRAPH = 512


class Counted(Enum):
    """Where an allocation comes out of.

    ``BUDGET``: vLLM's profiling sees it and the KV cache gets less. ``OUTSIDE``: it is made after
    profiling, or before vLLM measures, and comes out of what ``--gpu-memory-utilization`` leaves.
    ``MOMENT``: the same, and given back.
    """

    BUDGET = "budget"
    OUTSIDE = "outside"
    MOMENT = "moment"


@dataclass(frozen=True, slots=True)
class Line:
    """One allocation of a rank.

    Attributes:
        key: a short name that does not change.
        name: what it is.
        bytes: with this package.
        stock_bytes: with stock vLLM.
        counted: where it comes out of with this package.
        stock_counted: the same with stock vLLM.
        low, high: the range of an estimate; both ``bytes`` where it is exact.
        shrink: what makes it smaller.
    """

    key: str
    name: str
    bytes: int
    stock_bytes: int
    counted: Counted
    stock_counted: Counted
    low: int
    high: int
    shrink: str = ""

    @property
    def profiled(self) -> bool:
        """Whether memory profiling counts it with this package."""
        return self.counted is Counted.BUDGET

    @property
    def is_estimate(self) -> bool:
        """Whether it has a range."""
        return self.low < self.high


@dataclass(frozen=True, slots=True)
class Subject:
    """What lines are made of.

    Attributes:
        spec: the model.
        weights: bytes of a rank by kind.
        fp4: whether the routed experts are NVFP4.
        workload: sizes.
        deployment: topology and cache dtype.
        cache_format: how the cache stores a row.
        backend: the backend that serves, stock's or ours.
        sms: multiprocessors of the GPU.
        split: how launches use our workspace; None where the backend has none.
        user_workspace: the user's workspace size, or None.
        settings: this package's.
        graphs, autotune: the user's figures; None for estimates.
    """

    spec: ModelSpec
    weights: Mapping[Kind, int]
    fp4: bool
    workload: Workload
    deployment: Deployment
    cache_format: str
    backend: str
    sms: int
    split: WorkspacePlan | None
    user_workspace: int | None
    settings: Settings
    graphs: Estimate
    autotune: Estimate | None


_SHRINK_WEIGHTS = {
    Kind.EXPERTS: "more ranks (--tensor-parallel-size, --prefill-context-parallel-size), or a "
    "checkpoint of fewer bits",
    Kind.HEADS: "a larger --tensor-parallel-size, or a checkpoint that quantises attention",
    Kind.MLP: "a larger --tensor-parallel-size",
    Kind.VOCABULARY: "a larger --tensor-parallel-size",
    Kind.REPLICATED: "another checkpoint only, every rank holds them",
    Kind.DRAFTER: "no --speculative-config",
    Kind.ABSORBED: "a larger --tensor-parallel-size",
}
_TOKENS = "a smaller --max-num-batched-tokens"
_CONTEXT = "a smaller --max-model-len"
_SEQS = "a smaller --max-num-seqs"


def memory_lines(s: Subject) -> list[Line]:
    """All lines but the KV cache, in the order in which they are allocated."""
    return [line for part in (_loaded, _profiled, _outside, _moments) for line in part(s)]


def has_trtllm_workspace(backend: str, arch: tuple[int, int], settings: Settings) -> bool:
    """Whether a backend calls the trtllm-gen kernel, or the reference in its place.

    The class makes the workspace, whichever kernel it calls.
    """
    runs = arch[0] == 10 or settings.kernel == "reference"
    return runs and backend in (FLASHINFER, FLASH_ATTN_4)


def _exact(
    key: str, name: str, size: int, counted: Counted, shrink: str, stock: int | None = None
) -> Line:
    stock_size = size if stock is None else stock
    return Line(key, name, size, stock_size, counted, counted, size, size, shrink)


def _estimated(key: str, name: str, e: Estimate, counted: Counted, shrink: str) -> Line:
    return Line(key, name, e.bytes, e.bytes, counted, counted, e.low, e.high, shrink)


def _loaded(s: Subject) -> Iterator[Line]:
    budget = Counted.BUDGET
    for kind, size in s.weights.items():
        key = f"weights_{kind.name.lower()}"
        yield _exact(key, kind.value, size, budget, _SHRINK_WEIGHTS[kind])
    yield _exact("rope", "rotary tables", s.spec.rope_table_bytes, budget, "")
    topk = buffers.topk_buffer_bytes(s.spec, s.workload)
    yield _exact("topk", "top-k buffer", topk, budget, _TOKENS)
    groups = buffers.index_group_bytes(s.spec, s.workload)
    yield _exact("index_groups", "top-k rows of layer groups", groups, budget, _SEQS)
    yield from _trtllm_workspace(s)
    if s.backend == FLASH_ATTN_3 and s.deployment.dcp > 1:
        partials = partial_bytes(s.spec.kv_lora_rank, s.sms)
        yield _exact("partials", "partial results of split keys", partials, budget, "", 0)
    if (gathered := _pcp_gather(s)) is not None:
        shrink = "a smaller VLLM_DCP_MLA_GATHER_LIMIT_BYTES"
        yield _exact("pcp_gather", "gathered keys of prefills", gathered, budget, shrink, 0)
    yield from _symmetric(s)


def _trtllm_workspace(s: Subject) -> Iterator[Line]:
    """Ours is made while the model loads; stock's after profiling."""
    d, tokens = s.deployment, s.workload.max_num_batched_tokens
    if not has_trtllm_workspace(s.backend, d.arch, s.settings):
        return
    stock_slab, stock_scratch = stock_slab_and_scratch(d, tokens, s.user_workspace)
    slab, scratch = stock_slab, stock_scratch
    ours = s.split is not None
    if s.split is not None:
        slab, scratch = s.split.slab_bytes, s.split.total_bytes - s.split.slab_bytes
    counted = Counted.BUDGET if ours else Counted.OUTSIDE
    counters = stock_counters = counter_bytes(d.kernel_heads, tokens, s.sms)
    if s.split is not None:
        counters = s.split.counter_bytes(s.sms)
    for key, name, size, stock, shrink in (
        ("slab", "trtllm-gen softmax-statistics slab", slab, stock_slab, "a smaller "
         "VLLM_DCP_MLA_SLAB_LIMIT_BYTES" if ours else _TOKENS),
        ("scratch", "trtllm-gen scratch", scratch, stock_scratch,
         "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE"),
        ("counters", "trtllm-gen counter buffer", counters, stock_counters, ""),
    ):  # fmt: skip
        if size or stock:
            yield Line(key, name, size, stock, counted, Counted.OUTSIDE, size, size, shrink)


def stock_slab_and_scratch(
    d: Deployment, tokens: int, user_workspace: int | None
) -> tuple[int, int]:
    """Stock's workspace; the user's size replaces it, and the slab is carved off it."""
    total = stock_workspace_bytes(d.heads_per_rank, d.dcp, tokens)
    slab = softmax_stats_bytes(d.heads_per_rank * d.dcp, tokens) if d.dcp > 1 else 0
    if user_workspace is not None:
        total = user_workspace
        slab = min(slab, total)
    return slab, total - slab


def _pcp_gather(s: Subject) -> int | None:
    """Bytes in which our classes gather what prefill rows attend; None where they do not."""
    d, w = s.deployment, s.workload
    if d.pcp == 1 or d.dcp == 1 or not row(s.backend).ours:
        return None
    return plan_gather(
        limit_bytes=s.settings.gather_limit_bytes,
        row_bytes=s.spec.cache_row_width * (1 if s.cache_format == "fp8_e4m3" else 2),
        dcp=d.dcp,
        interleave=d.interleave,
        max_model_len=w.max_model_len,
        max_num_seqs=w.max_num_seqs,
        max_num_tokens=w.max_num_batched_tokens,
        heads=d.heads_per_rank,
        latent_dim=s.spec.kv_lora_rank,
    ).total_bytes


def _symmetric(s: Subject) -> Iterator[Line]:
    """Direct exchanges, made with the layers where NVLink spans the DCP group."""
    d = s.deployment
    if d.dcp == 1 or d.pcp > 1 or d.dcp > _NODE:
        return
    rows = buffers.symmetric_rows(s.workload, _largest_graph(s))
    size = buffers.symmetric_query_bytes(
        rows, d.kernel_heads, s.spec.cache_row_width, _query_bytes(s)
    )
    if d.comm == "a2a":
        size += buffers.symmetric_output_bytes(rows, d.dcp, d.heads_per_rank, s.spec.kv_lora_rank)
    exchanges = Estimate(size, 0, size)
    name = "direct exchanges (symmetric memory)"
    yield _estimated("symmetric", name, exchanges, Counted.BUDGET, _SEQS)


def _profiled(s: Subject) -> Iterator[Line]:
    d = s.deployment
    gather = buffers.indexer_gather_bytes(s.spec, s.workload, d.pcp, d.dcp)
    name, shrink = "shared workspace: indexer's gathered keys", _CONTEXT
    if s.backend == FLASHMLA and s.cache_format.endswith("ds_mla"):
        kv = buffers.flashmla_gather_bytes(s.spec, s.workload, d.heads_per_rank, d.tp, d.pcp, d.dcp)
        if kv > gather:
            gather, name = kv, "shared workspace: FlashMLA's gathered rows"
            shrink = f"{_CONTEXT} or {_TOKENS.removeprefix('a ')}"
    yield _exact("gather", name, gather, Counted.BUDGET, shrink)
    peak = estimates.peak_bytes(s.spec, s.workload, d.tp, d.pcp, fp4=s.fp4)
    yield _estimated("peak", "peak of the profiled step", peak, Counted.BUDGET, _TOKENS)
    if s.graphs.bytes:
        shrink = "fewer or smaller --cudagraph-capture-sizes, or --enforce-eager"
        yield _estimated("graphs", "CUDA graphs", s.graphs, Counted.BUDGET, shrink)


def _outside(s: Subject) -> Iterator[Line]:
    d, w, spec, outside = s.deployment, s.workload, s.spec, Counted.OUTSIDE
    yield _estimated("context", "CUDA context, NCCL, cuBLAS", estimates.OUTSIDE, outside, "")
    builders = buffers.mla_builders(spec, w)
    context = builders * buffers.context_workspace_bytes(spec, w, d.dcp)
    yield _exact("context_rows", "dense prefill's context rows", context, outside, _SEQS)
    if mask := builders * buffers.mask_workspace_bytes(spec, d.arch, s.cache_format):
        yield _exact("mask", "top-k masks", mask, outside, "--kv-cache-dtype fp8_e4m3")
    indexers = buffers.indexer_builders(w)
    tables = indexers * buffers.expanded_block_table_bytes(w, d.dcp)
    shrink = f"{_TOKENS} or {_CONTEXT.removeprefix('a ')}"
    yield _exact("indexer_tables", "indexer's block tables", tables, outside, shrink)
    state = indexers * buffers.indexer_state_bytes(w, s.sms)
    # Our builder keeps an empty schedule beside the one of stock.
    ours = indexers * 2 * (s.sms + 1) * 4 if d.dcp > 1 else 0
    yield _exact("indexer_state", "indexer's other buffers", state + ours, outside, _TOKENS, state)
    runner = buffers.runner_block_table_bytes(w, d.dcp)
    yield _exact("block_tables", "runner's block tables", runner, outside, shrink)
    if d.dcp > 1 and d.pcp == 1 and d.dcp <= _NODE:
        rows = buffers.context_rows(spec, w, d.dcp)
        gather = 2 * rows * spec.cache_row_width * 2
        estimate = Estimate(gather, 0, gather)
        yield _estimated("symmetric_kv", "direct gather of context rows", estimate, outside, _SEQS)


def _moments(s: Subject) -> Iterator[Line]:
    d, w, moment = s.deployment, s.workload, Counted.MOMENT
    if d.dcp > 1:
        # PCP merges the choices of decode rows only: its prefills see all keys.
        rows = w.decode_rows if d.pcp > 1 else w.max_num_batched_tokens
        stock = exchange_bytes(rows, s.spec.index_topk, d.dcp)
        max_rows(s.settings.merge_limit_bytes, s.spec.index_topk, d.dcp)  # refuses as an engine
        merge = min(stock, max(s.settings.merge_limit_bytes, _decode_merge(s)))
        shrink = "a smaller VLLM_DCP_MLA_MERGE_LIMIT_BYTES"
        yield _exact("merge", "exchange of top-k candidates", merge, moment, shrink, stock)
        rows = -(-w.max_num_batched_tokens // d.pcp)
        attention = buffers.attention_transient_bytes(
            rows, d.kernel_heads, s.spec, _query_bytes(s), a2a=d.comm == "a2a"
        )
        yield _exact("attention", "one layer's queries and outputs", attention, moment, _TOKENS)
    autotune = s.autotune or estimates.autotune_bytes(s.spec, w, d.arch, d.tp, d.pcp, fp4=s.fp4)
    yield _estimated("autotune", "autotune headroom", autotune, moment, _TOKENS)


def _decode_merge(s: Subject) -> int:
    """Decode steps are one chunk, whatever the limit is."""
    return exchange_bytes(s.workload.decode_rows, s.spec.index_topk, s.deployment.dcp)


def _query_bytes(s: Subject) -> int:
    return 1 if s.backend == FLASHINFER and s.cache_format == "fp8_e4m3" else 2


def _largest_graph(s: Subject) -> int:
    return _LARGEST_GRAPH.get(s.deployment.arch[0], _OTHER_LARGEST_GRAPH)
