"""The memory of a configuration, line by line, stock vLLM beside this package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ..capability import (
    FLASH_ATTN_3,
    FLASHINFER,
    FLASHMLA,
    Deployment,
    Libraries,
    row,
    serving,
)
from ..capability_rules import arch_name
from ..key_splits import partial_bytes
from ..settings import Settings, env_name
from ..simulate.gpus import Gpu
from ..workspace import WorkspacePlan, plan_workspace
from . import estimates, kv_cache, outcome
from .estimates import Estimate
from .flags import flags_of, refused_by_all
from .kv_cache import CacheRows, KvCapacity
from .lines import (
    Line,
    Subject,
    has_trtllm_workspace,
    memory_lines,
    stock_slab_and_scratch,
)
from .model import ModelMemory, ModelMemoryError, read_model
from .outcome import Outcome
from .request import Request
from .weights import rank_weights
from .workload import Workload

#: The largest step that is searched for, and the grain of the search.
_MOST_TOKENS = 131072
_TOKENS_STEP = 256


@dataclass(frozen=True, slots=True)
class Workspace:
    """The trtllm-gen workspace of a rank; all bytes 0 where there is none.

    Attributes:
        heads: query heads the kernel sees.
        stock_heads: query heads that stock vLLM sizes it for.
        tokens_per_launch: most tokens of a launch.
        launches: launches of a full step.
        slab_bytes: softmax statistics that a launch carves off.
        total_bytes: slab and scratch.
        stock_total_bytes: what stock vLLM allocates.
    """

    heads: int = 0
    stock_heads: int = 0
    tokens_per_launch: int = 0
    launches: int = 0
    slab_bytes: int = 0
    total_bytes: int = 0
    stock_total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer.

    Attributes:
        kv_cache_dtype: after the model's defaults; as typed where no GPU is known.
        served_by: name of the backend, None where dcp is 1 or nothing serves.
        workspace: the trtllm-gen workspace.
        lines: every allocation but the KV cache.
        ours: what they add up to with this package; None where nothing was planned.
        stock: the same with stock vLLM.
        rows: what a token takes in the KV cache.
        checkpoint_bytes: bytes of the checkpoint, its MTP layers included.
        weights_from: where the bytes of weights come from.
        context: tokens of a request for which concurrency is said.
        kv_gain: logical tokens beside the same GPUs without DCP, None where that does not fit.
        max_tokens: the largest ``--max-num-batched-tokens`` that works, None when none does.
        flags: for ``vllm serve``.
        notes: what the figures do not say, one sentence each.
        warnings: what may go wrong, one sentence each.
        problems: why it does not work, one sentence each; empty when it does.
        limit: the problem of a limit that does not hold the least that an engine needs, which stops
            while it starts; empty where all do, or none was looked at.
    """

    kv_cache_dtype: str
    served_by: str | None = None
    workspace: Workspace = Workspace()
    lines: list[Line] = field(default_factory=list)
    ours: Outcome | None = None
    stock: Outcome | None = None
    rows: CacheRows | None = None
    checkpoint_bytes: int = 0
    weights_from: str = ""
    context: int = 0
    kv_gain: float | None = None
    max_tokens: int | None = None
    flags: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    limit: str = ""


@dataclass(frozen=True, slots=True)
class _Case:
    """What does not change while batch and DCP are varied."""

    request: Request
    gpu: Gpu
    model: ModelMemory
    settings: Settings
    user_workspace: int | None

    def total_bytes(self) -> int:
        return self.request.total_bytes or self.gpu.memory_bytes


@dataclass(frozen=True, slots=True)
class _Evaluated:
    lines: list[Line]
    ours: Outcome
    stock: Outcome
    split: WorkspacePlan | None
    rows: CacheRows


def make_plan(
    request: Request,
    gpu: Gpu,
    libraries: Libraries,
    settings: Settings,
    user_workspace: int | None,
) -> Plan:
    """Plans a request.

    Args:
        request: what was asked for.
        gpu: the GPU it runs on.
        libraries: what is installed there.
        settings: this package's settings.
        user_workspace: bytes of the user's ``VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE``, or None.
    """
    if problems := request.problems():
        return Plan(request.kv_cache_dtype, problems=problems)
    d = request.deployment(gpu, libraries, kernel=settings.kernel)
    served_by = None if d.dcp == 1 else serving(d)
    if d.dcp > 1 and served_by is None:
        return Plan(d.kv_cache_dtype, problems=refused_by_all(request, d))
    try:
        model = read_model(request.model, request.config)
    except ModelMemoryError as error:
        return Plan(d.kv_cache_dtype, served_by, problems=[str(error)])
    case = _Case(request, gpu, model, settings, user_workspace)
    workload = request.workload(model.spec)
    if problems := request.workload_problems(model.spec):
        return Plan(d.kv_cache_dtype, served_by, problems=problems)
    try:
        done = _evaluate(case, d, workload)
    except ValueError as error:  # a limit that does not hold one token, or one row
        return Plan(d.kv_cache_dtype, served_by, problems=[str(error)], limit=str(error))
    return _answer(case, d, served_by, workload, done)


def _answer(
    case: _Case, d: Deployment, served_by: str | None, workload: Workload, done: _Evaluated
) -> Plan:
    request, model = case.request, case.model
    answer = Plan(
        kv_cache_dtype=d.kv_cache_dtype,
        served_by=served_by,
        workspace=_workspace(case, d, workload, done.split),
        lines=done.lines,
        ours=done.ours,
        stock=done.stock,
        rows=done.rows,
        checkpoint_bytes=model.checkpoint_bytes,
        weights_from=model.weights_from,
        context=request.context or workload.max_model_len,
        kv_gain=_gain(case, d, workload, done.ours.kv),
        max_tokens=_largest_batch(case, d, workload),
        notes=_notes(case, d, served_by, workload),
        warnings=[*_switched_off(case.settings), *outcome.warnings(done.ours)],
        problems=outcome.refusals(done.ours, done.lines, workload.max_model_len),
    )
    return answer if answer.problems else replace(answer, flags=flags_of(request, d, workload))


def _evaluate(case: _Case, d: Deployment, workload: Workload) -> _Evaluated:
    backend = serving(d) if d.dcp > 1 else _stock_backend(d)
    assert backend is not None
    spec, total = case.model.spec, case.total_bytes()
    cache_format = _cache_format(backend, d)
    split = None
    if d.dcp > 1 and has_trtllm_workspace(backend, d.arch, case.settings):
        split = plan_workspace(
            d.kernel_heads,
            workload.max_num_batched_tokens,
            slab_limit_bytes=case.settings.slab_limit_bytes,
            workspace_bytes=case.user_workspace,
        )
    drafter = workload.spec_tokens > 0
    lines = memory_lines(
        Subject(
            spec=spec,
            weights=rank_weights(case.model.weights, spec, d.tp, d.pcp, drafter=drafter),
            fp4=case.model.fp4_experts,
            workload=workload,
            deployment=d,
            cache_format=cache_format,
            backend=backend,
            sms=case.gpu.sms,
            split=split,
            user_workspace=case.user_workspace,
            settings=case.settings,
            graphs=_graphs(case.request),
            autotune=_given(case.request.autotune_bytes),
        )
    )
    row_bytes = kv_cache.row_bytes(cache_format, spec.cache_row_width)
    rows = kv_cache.cache_rows(spec, row_bytes, drafter=drafter)

    def make_kv(budget: int) -> KvCapacity:
        return KvCapacity(rows.bytes_per_token, budget, workload.block_size, d.dcp)

    used = case.request.utilization
    return _Evaluated(
        lines=lines,
        ours=outcome.add_up(lines, total, used, make_kv),
        stock=outcome.add_up(lines, total, used, make_kv, stock=True),
        split=split,
        rows=rows,
    )


def _graphs(request: Request) -> Estimate:
    if request.eager:
        return Estimate.exactly(0)
    return _given(request.graphs_bytes) or estimates.GRAPHS


def _given(size: int | None) -> Estimate | None:
    return None if size is None else Estimate.exactly(size)


def _stock_backend(d: Deployment) -> str:
    """What vLLM picks without DCP."""
    if d.arch[0] == 10 and d.kv_cache_dtype in row(FLASHINFER).formats:
        return FLASHINFER
    return FLASHMLA


def _cache_format(backend: str, d: Deployment) -> str:
    formats = row(backend).formats
    return formats.get(d.kv_cache_dtype, d.kv_cache_dtype)


def _gain(case: _Case, d: Deployment, workload: Workload, kv: KvCapacity) -> float | None:
    """Beside the same GPUs without DCP."""
    if d.dcp == 1:
        return None
    alone = _evaluate(case, replace(d, dcp=1), workload)
    return kv_cache.gain(alone.ours.kv, kv)


def _largest_batch(case: _Case, d: Deployment, workload: Workload) -> int | None:
    def works(tokens: int) -> bool:
        w = replace(
            workload,
            max_num_batched_tokens=tokens,
            max_num_seqs=min(workload.max_num_seqs, tokens),
        )
        done = _evaluate(case, d, w)
        return not outcome.refusals(done.ours, done.lines, w.max_model_len)

    return largest(works, _TOKENS_STEP, _MOST_TOKENS)


def largest(works: Callable[[int], bool], step: int, most: int) -> int | None:
    """The largest multiple of ``step`` up to ``most`` that works, where smaller ones do too."""
    low, high = 0, most // step
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if works(middle * step) else (low, middle - 1)
    return low * step or None


def _workspace(
    case: _Case, d: Deployment, workload: Workload, split: WorkspacePlan | None
) -> Workspace:
    tokens = workload.max_num_batched_tokens
    heads = Workspace(heads=d.kernel_heads, stock_heads=d.heads_per_rank * d.dcp)
    backend = serving(d) if d.dcp > 1 else _stock_backend(d)
    if backend == FLASH_ATTN_3:
        size = partial_bytes(d.dims.kv_lora_rank, case.gpu.sms)
        return replace(heads, tokens_per_launch=tokens, launches=1, total_bytes=size)
    if backend is None or not has_trtllm_workspace(backend, d.arch, case.settings):
        return heads
    stock_total = sum(stock_slab_and_scratch(d, tokens, case.user_workspace))
    if split is None:
        return replace(
            heads,
            tokens_per_launch=tokens,
            launches=1,
            total_bytes=stock_total,
            stock_total_bytes=stock_total,
        )
    return replace(
        heads,
        tokens_per_launch=split.tokens_per_launch,
        launches=split.num_launches(tokens),
        slab_bytes=split.slab_bytes,
        total_bytes=split.total_bytes,
        stock_total_bytes=stock_total,
    )


def _switched_off(settings: Settings) -> list[str]:
    if not settings.disable:
        return []
    return [f"{env_name('disable')} is set: vLLM is left untouched, as stock; unset it."]


def _notes(case: _Case, d: Deployment, served_by: str | None, workload: Workload) -> list[str]:
    notes = []
    backend = served_by or _stock_backend(d)
    if d.dcp == 1:
        notes.append("Without DCP all of it is stock vLLM's: no LSE is asked for, no slab made.")
    elif has_trtllm_workspace(backend, d.arch, case.settings):
        notes.append(
            "The workspace is made while the model loads, so that profiling counts it; stock vLLM "
            "makes its own afterwards, outside the KV budget."
        )
    elif backend == FLASH_ATTN_3:
        notes.append(
            "The workspace is the same for every model and step; it is made while the model loads, "
            "so that profiling counts it. Stock vLLM does not serve this configuration."
        )
    elif not row(backend).ours:
        notes.append(
            f"{backend} serves this on {arch_name(d.arch)}, with a class of stock vLLM: it has no "
            "trtllm-gen workspace."
        )
    user = case.user_workspace
    if user is not None and d.dcp > 1 and has_trtllm_workspace(backend, d.arch, case.settings):
        needed = sum(stock_slab_and_scratch(d, workload.max_num_batched_tokens, None))
        if user < needed:
            notes.append(
                f"VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE is {user} bytes: launches are split to fit "
                f"it; stock vLLM would need {needed} bytes for a full step and may overflow it."
            )
    if d.dcp > 1 and d.pcp > 1 and backend == FLASHINFER:
        notes.append("Stock vLLM refuses PCP with DCP here; its column is what its formulas give.")
    return notes
