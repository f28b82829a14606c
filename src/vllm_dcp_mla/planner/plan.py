"""The memory of a configuration, stock vLLM beside this package: the attention workspace."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ..capability import (
    FLASH_ATTN_3,
    FLASHINFER,
    TABLE,
    Deployment,
    Libraries,
    refusals,
    row,
    serving,
    suggestion,
)
from ..capability_rules import arch_name
from ..key_splits import partial_bytes
from ..settings import Settings
from ..simulate.gpus import Gpu
from ..workspace import (
    WorkspacePlan,
    counter_bytes,
    plan_workspace,
    softmax_stats_bytes,
    stock_workspace_bytes,
)
from .defaults import model_defaults
from .request import Request


@dataclass(frozen=True, slots=True)
class Line:
    """One allocation of a rank.

    Attributes:
        name: what it is.
        bytes: with this package.
        stock_bytes: with stock vLLM.
        profiled: whether vLLM's memory profiling sees it with this package, so that the KV cache is
            sized with it; stock's is made after profiling.
    """

    name: str
    bytes: int
    stock_bytes: int
    profiled: bool


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
        lines: what it consists of.
        flags: for ``vllm serve``.
        notes: what the figures do not say, one sentence each.
        problems: why it does not work, one sentence each; empty when it does.
    """

    kv_cache_dtype: str
    served_by: str | None = None
    workspace: Workspace = Workspace()
    lines: list[Line] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


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
    if d.dcp == 1:
        return _plan_without_dcp(request, d, user_workspace)
    served_by = serving(d)
    if served_by is None:
        return Plan(d.kv_cache_dtype, problems=_refused_by_all(request, d))
    flags = _flags(request, d)
    if not row(served_by).ours:
        note = (
            f"{served_by} serves this on {arch_name(d.arch)}, with a class of stock vLLM: it has "
            "no trtllm-gen workspace."
        )
        heads = Workspace(heads=d.kernel_heads, stock_heads=d.heads_per_rank * d.dcp)
        return Plan(d.kv_cache_dtype, served_by, heads, flags=flags, notes=[note])
    if served_by == FLASH_ATTN_3:
        return _plan_partials(request, d, gpu, flags)
    try:
        split = plan_workspace(
            d.kernel_heads,
            request.max_num_batched_tokens,
            slab_limit_bytes=settings.slab_limit_bytes,
            workspace_bytes=user_workspace,
        )
    except ValueError as error:
        return Plan(d.kv_cache_dtype, served_by, problems=[str(error)])
    return _plan_split(request, d, gpu, split, user_workspace, served_by, flags)


def _plan_partials(request: Request, d: Deployment, gpu: Gpu, flags: list[str]) -> Plan:
    size = partial_bytes(d.dims.kv_lora_rank, gpu.sms)
    workspace = Workspace(
        heads=d.kernel_heads,
        stock_heads=d.heads_per_rank * d.dcp,
        tokens_per_launch=request.max_num_batched_tokens,
        launches=1,
        total_bytes=size,
    )
    lines = [Line("partial results of split keys", size, 0, profiled=True)]
    same = (
        "The workspace is the same for every model and step; it is made while the model loads, so "
        "that memory profiling counts it."
    )
    notes = [same, "Stock vLLM does not serve this configuration."]
    return Plan(d.kv_cache_dtype, FLASH_ATTN_3, workspace, lines, flags, notes)


def _plan_split(
    request: Request,
    d: Deployment,
    gpu: Gpu,
    split: WorkspacePlan,
    user_workspace: int | None,
    served_by: str,
    flags: list[str],
) -> Plan:
    tokens = request.max_num_batched_tokens
    stock_heads = d.heads_per_rank * d.dcp
    stock_slab = softmax_stats_bytes(stock_heads, tokens)
    stock_total = stock_workspace_bytes(d.heads_per_rank, d.dcp, tokens)
    counted = (
        "The workspace is made while the model loads, so that memory profiling counts it; stock "
        "vLLM makes its own after profiling, outside the KV budget."
    )
    notes = [counted]
    if user_workspace is not None:
        if user_workspace < stock_total:
            notes.append(
                f"VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE is {user_workspace} bytes: launches are "
                f"split to fit it; stock vLLM would need {stock_total} bytes for a full step and "
                "may overflow it."
            )
        stock_total = user_workspace
        stock_slab = min(stock_slab, stock_total)
    workspace = Workspace(
        heads=split.num_heads,
        stock_heads=stock_heads,
        tokens_per_launch=split.tokens_per_launch,
        launches=split.num_launches(tokens),
        slab_bytes=split.slab_bytes,
        total_bytes=split.total_bytes,
        stock_total_bytes=stock_total,
    )
    lines = [
        Line("trtllm-gen softmax-statistics slab", split.slab_bytes, stock_slab, profiled=True),
        Line(
            "trtllm-gen scratch",
            split.total_bytes - split.slab_bytes,
            stock_total - stock_slab,
            profiled=True,
        ),
        Line(
            "trtllm-gen counter buffer",
            split.counter_bytes(gpu.sms),
            # FlashInfer makes one of this size in every call that is given none.
            counter_bytes(d.kernel_heads, tokens, gpu.sms),
            profiled=True,
        ),
    ]
    return Plan(d.kv_cache_dtype, served_by, workspace, lines, flags, notes)


def _plan_without_dcp(request: Request, d: Deployment, user_workspace: int | None) -> Plan:
    notes = ["Without DCP everything is stock vLLM's: no LSE is asked for, so there is no slab."]
    flags = _flags(request, d)
    workspace = Workspace(heads=d.heads_per_rank, stock_heads=d.heads_per_rank)
    lines = []
    if d.arch[0] == 10 and d.kv_cache_dtype in row(FLASHINFER).formats:
        tokens = request.max_num_batched_tokens
        total = user_workspace or stock_workspace_bytes(d.heads_per_rank, d.dcp, tokens)
        workspace = Workspace(
            heads=d.heads_per_rank,
            stock_heads=d.heads_per_rank,
            tokens_per_launch=tokens,
            launches=1,
            total_bytes=total,
            stock_total_bytes=total,
        )
        lines = [Line("trtllm-gen scratch", total, total, profiled=False)]
        notes.append(f"The workspace exists where vLLM picks {FLASHINFER}.")
    else:
        notes.append(
            f"There is no trtllm-gen workspace with kv-cache-dtype {d.kv_cache_dtype} on "
            f"{arch_name(d.arch)}."
        )
    return Plan(d.kv_cache_dtype, None, workspace, lines, flags, notes)


def _refused_by_all(request: Request, d: Deployment) -> list[str]:
    problems = [f"{r.name} refuses: {'; '.join(refusals(r.name, d))}." for r in TABLE]
    # Seen from the model's default exchange, so that a change of it is named too.
    comm = request.comm or model_defaults(request.config).comm
    other = suggestion(replace(d, comm=comm))
    problems.append(
        f"No backend serves this on {arch_name(d.arch)}; use {other}."
        if other
        else f"No backend serves DCP with these {d.tp * d.pcp} GPUs ({arch_name(d.arch)}); leave "
        "out --decode-context-parallel-size."
    )
    return problems


def _flags(request: Request, d: Deployment) -> list[str]:
    flags = [f"--tensor-parallel-size {d.tp}"]
    if d.pcp > 1:
        flags.append(f"--prefill-context-parallel-size {d.pcp}")
    if d.dcp > 1:
        flags.append(f"--decode-context-parallel-size {d.dcp}")
        if d.pcp > 1 or request.comm is not None:
            flags.append(f"--dcp-comm-backend {d.comm}")
    flags.append(f"--kv-cache-dtype {d.kv_cache_dtype}")
    flags.append(f"--max-num-batched-tokens {request.max_num_batched_tokens}")
    return flags


def plan_json(request: Request | None, plan: Plan) -> dict[str, Any]:
    """The machine-readable answer; every key is there, whatever the answer is.

    Args:
        request: what was asked for, None where it could not be read.
        plan: the answer.
    """
    w = plan.workspace
    return {
        "ok": not plan.problems,
        "problems": plan.problems,
        "topology": {
            "tp": request.tp if request else None,
            "pcp": request.pcp if request else None,
            "dcp": request.dcp if request else None,
            "gpu": request.gpu if request else None,
            "kv_cache_dtype": plan.kv_cache_dtype if request else None,
        },
        "workspace": {
            "heads": w.heads,
            "tokens_per_launch": w.tokens_per_launch,
            "slab_bytes": w.slab_bytes,
            "total_bytes": w.total_bytes,
            "stock_total_bytes": w.stock_total_bytes,
        },
        "lines": [
            {
                "name": line.name,
                "bytes": line.bytes,
                "stock_bytes": line.stock_bytes,
                "profiled": line.profiled,
            }
            for line in plan.lines
        ],
        "flags": plan.flags,
    }
