"""What runs where: one table that selection, ``doctor`` and the README share.

A backend is asked with a :class:`Deployment` and answers with reasons; no reason means yes. Only
deployments with ``dcp > 1`` are asked here, all others are stock vLLM's own business.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from . import capability_rules as rules
from .capability_rules import BF16, DS_MLA, FP8, KvCacheFormat, arch_name
from .compat.refusals import release_refusals
from .compat.releases import NEWEST, Release
from .settings import KernelChoice, KernelName
from .topology import check_topology, divisors, gathered_heads, valid_dcp_sizes

FLASHINFER = "FLASHINFER_MLA_SPARSE"
FLASH_ATTN_4 = "FLASH_ATTN_MLA_SPARSE_FA4"
FLASH_ATTN_3 = "FLASH_ATTN_MLA_SPARSE"
FLASHMLA = "FLASHMLA_SPARSE"

_FLAGS = {
    "tp": "--tensor-parallel-size",
    "pcp": "--prefill-context-parallel-size",
    "dcp": "--decode-context-parallel-size",
    "kv_cache_dtype": "--kv-cache-dtype",
    "comm": "--dcp-comm-backend",
    "interleave": "--cp-kv-cache-interleave-size",
    "kernel": "the setting kernel",
}


@dataclass(frozen=True, slots=True)
class ModelDims:
    """What the kernels need to know of a model; heads are query heads before tensor parallelism."""

    heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    index_topk: int | None


@dataclass(frozen=True, slots=True)
class Libraries:
    """vLLM's series, and what is installed beside it; None and False mean missing."""

    flashinfer: str | None
    flashmla: bool
    flash_attn_4: bool
    flash_attn_3: bool = True
    release: Release = NEWEST


@dataclass(frozen=True, slots=True)
class Deployment:
    """One model on one kind of GPU.

    Attributes:
        arch: compute capability, such as ``(10, 0)``.
        kv_cache_dtype: vLLM's ``--kv-cache-dtype`` after the model's own defaults.
        tp, pcp, dcp: parallel sizes.
        comm: ``--dcp-comm-backend`` after the model's own defaults.
        dims: the model.
        libraries: what is installed.
        kernel: the attention kernel that is forced by name (the setting ``kernel``), or ``auto``.
        interleave: ``--cp-kv-cache-interleave-size``.
    """

    arch: tuple[int, int]
    kv_cache_dtype: str
    tp: int
    pcp: int
    dcp: int
    comm: str
    dims: ModelDims
    libraries: Libraries
    kernel: KernelChoice = "auto"
    interleave: int = 1

    @property
    def any_device(self) -> bool:
        """Whether a kernel that runs anywhere is forced."""
        return self.kernel == "reference"

    @property
    def heads_per_rank(self) -> int:
        """Query heads of one rank."""
        return self.dims.heads // self.tp

    @property
    def kernel_heads(self) -> int:
        """Query heads that the kernel of one rank sees, in decode steps at least."""
        return gathered_heads(self.heads_per_rank, self.tp, self.pcp, self.dcp)

    @property
    def launch_heads(self) -> tuple[int, ...]:
        """Query heads of all launches: with PCP, prefill rows have those of one rank."""
        alike = self.pcp == 1 or self.kernel_heads == self.heads_per_rank
        return (self.kernel_heads,) if alike else (self.kernel_heads, self.heads_per_rank)


@dataclass(frozen=True, slots=True)
class BackendRow:
    """A line of the table.

    Attributes:
        name: vLLM's enum member.
        arch_majors: major compute capabilities it runs on.
        formats: cache formats it reads, by the spelling of ``--kv-cache-dtype``.
        library: the reason why its library is missing, or None.
        rules: further reasons.
        kernels: what the setting ``kernel`` may name for it; empty where the class is stock's.
    """

    name: str
    arch_majors: tuple[int, ...]
    formats: dict[str, KvCacheFormat]
    library: rules.Library
    rules: rules.Rules
    kernels: tuple[KernelName, ...] = ()

    @property
    def ours(self) -> bool:
        """Whether this package's class serves it under DCP."""
        return bool(self.kernels)


def _fp8_is_flashmlas(d: Deployment) -> str | None:
    if d.kv_cache_dtype != "fp8" or refusals(FLASHMLA, d):
        return None
    return (
        f"kv-cache-dtype fp8 is fp8_ds_mla here, which {FLASHMLA} serves; this backend reads "
        "fp8_e4m3"
    )


#: In the order in which a suggestion prefers them.
TABLE: tuple[BackendRow, ...] = (
    BackendRow(
        FLASHINFER,
        (10,),
        BF16 | {"float16": "bfloat16"} | FP8,
        rules.FLASHINFER_LIBRARY,
        rules.FLASHINFER_RULES,
        ("trtllm_gen", "reference"),
    ),
    BackendRow(
        FLASH_ATTN_4,
        (10,),
        BF16,
        rules.FLASH_ATTN_4_LIBRARY,
        rules.FLASH_ATTN_4_RULES,
        ("trtllm_gen", "reference"),
    ),
    BackendRow(
        FLASH_ATTN_3,
        (9,),
        BF16 | FP8,
        lambda libraries: None,
        (*rules.HOPPER_RULES, _fp8_is_flashmlas),
        ("triton_decode", "flashmla", "flash_attn3"),
    ),
    BackendRow(
        FLASHMLA,
        (9, 10),
        # bf16 is named by the rule, which says why.
        DS_MLA | BF16,
        rules.FLASHMLA_LIBRARY,
        rules.FLASHMLA_RULES,
    ),
)


def row(name: str) -> BackendRow:
    """The table's line of a backend.

    Raises:
        KeyError: the table has no such backend.
    """
    return {r.name: r for r in TABLE}[name]


def refusals(name: str, d: Deployment) -> list[str]:
    """Why a backend does not serve a deployment with ``dcp > 1``; empty when it does."""
    r = row(name)
    reasons = release_refusals(name, d)
    if not d.any_device or not r.ours:
        if d.arch[0] not in r.arch_majors:
            needed = " or ".join(f"SM{major}x" for major in r.arch_majors)
            reasons.append(f"needs {needed}, got {arch_name(d.arch)}")
        if (missing := r.library(d.libraries)) is not None:
            reasons.append(missing)
    if r.ours and d.kernel not in ("auto", *r.kernels):
        known = ", ".join(r.kernels)
        reasons.append(f"the forced kernel {d.kernel} is not one of this backend's: {known}")
    if d.kv_cache_dtype not in r.formats:
        known = ", ".join(sorted(r.formats))
        reasons.append(f"kv-cache-dtype {d.kv_cache_dtype} is not one of {known}")
    reasons.extend(reason for rule in r.rules if (reason := rule(d)) is not None)
    return reasons


def serving(d: Deployment) -> str | None:
    """The first backend of the table that serves a deployment, None when none does."""
    return next((r.name for r in TABLE if not refusals(r.name, d)), None)


def suggestion(d: Deployment) -> str | None:
    """The flags to change so that a deployment works on the same GPUs, None when nothing does.

    The nearest change wins: DCP and PCP stay if they can, then the cache dtype, then the exchange,
    then a kernel that is forced.
    """
    best: tuple[tuple[int, ...], Deployment, str] | None = None
    for other in _neighbours(d):
        if (name := serving(other)) is None:
            continue
        distance = (
            int(other.dcp != d.dcp),
            int(other.pcp != d.pcp),
            int(other.kv_cache_dtype != d.kv_cache_dtype),
            abs(other.dcp - d.dcp) + abs(other.pcp - d.pcp),
            int(other.comm != d.comm),
            int(other.interleave != d.interleave),
            int(other.kernel != d.kernel),
        )
        if best is None or distance < best[0]:
            best = (distance, other, name)
    if best is None:
        return None
    _, other, name = best
    changes = [
        f"{flag}{' ' if flag.startswith('--') else '='}{getattr(other, field)}"
        for field, flag in _FLAGS.items()
        if getattr(other, field) != getattr(d, field)
    ]
    return f"{' '.join(changes)} (served by {name})" if changes else name


def _neighbours(d: Deployment) -> Iterator[Deployment]:
    world = d.tp * d.pcp
    for tp in divisors(world):
        pcp = world // tp
        for dcp in valid_dcp_sizes(tp, pcp):
            if dcp == 1 or check_topology(tp, pcp, dcp, d.dims.heads):
                continue
            for cache in dict.fromkeys((d.kv_cache_dtype, "fp8_e4m3", "bfloat16", "fp8_ds_mla")):
                for comm in dict.fromkeys((d.comm, "ag_rs")):
                    other = replace(d, tp=tp, pcp=pcp, dcp=dcp, kv_cache_dtype=cache, comm=comm)
                    for one in dict.fromkeys((other, replace(other, interleave=1))):
                        yield from dict.fromkeys((one, replace(one, kernel="auto")))


def explain(name: str, d: Deployment) -> str | None:
    """What a refusing backend answers selection with: its reasons, and what works instead.

    None when it serves.
    """
    reasons = refusals(name, d)
    if not reasons:
        return None
    other = suggestion(d)
    way_out = (
        f"works here: {other}"
        if other
        else f"nothing works with DCP on these {d.tp * d.pcp} GPUs; leave out {_FLAGS['dcp']}"
    )
    return f"{'; '.join(reasons)}; {way_out}"
