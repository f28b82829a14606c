"""What runs where: one table that selection, ``doctor`` and the README share.

A backend is asked with a :class:`Deployment` and answers with reasons; no reason means yes. Only
deployments with ``dcp > 1`` are asked here, all others are stock vLLM's own business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from packaging.version import Version

from .compat.refusals import release_refusals
from .compat.releases import NEWEST, Release
from .topology import check_topology, divisors, gathered_heads, valid_dcp_sizes

KvCacheFormat = Literal["bfloat16", "fp8_e4m3", "fp8_ds_mla", "nvfp4_ds_mla"]

FLASHINFER = "FLASHINFER_MLA_SPARSE"
FLASH_ATTN_4 = "FLASH_ATTN_MLA_SPARSE_FA4"
FLASHMLA = "FLASHMLA_SPARSE"

_FLAGS = {
    "tp": "--tensor-parallel-size",
    "pcp": "--prefill-context-parallel-size",
    "dcp": "--decode-context-parallel-size",
    "kv_cache_dtype": "--kv-cache-dtype",
    "comm": "--dcp-comm-backend",
    "interleave": "--cp-kv-cache-interleave-size",
}

#: The oldest FlashInfer whose sparse MLA decode returns an LSE.
MIN_FLASHINFER = "0.6.14"


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
        any_device: a kernel that runs anywhere is forced (``kernel=reference``).
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
    any_device: bool = False
    interleave: int = 1

    @property
    def heads_per_rank(self) -> int:
        """Query heads of one rank."""
        return self.dims.heads // self.tp

    @property
    def kernel_heads(self) -> int:
        """Query heads that the kernel of one rank sees."""
        return gathered_heads(self.heads_per_rank, self.tp, self.pcp, self.dcp)


@dataclass(frozen=True, slots=True)
class BackendRow:
    """A line of the table.

    Attributes:
        name: vLLM's enum member.
        arch_majors: major compute capabilities it runs on.
        formats: cache formats it reads, by the spelling of ``--kv-cache-dtype``.
        library: the reason why its library is missing, or None.
        rules: further reasons.
        ours: whether this package's class serves it under DCP.
    """

    name: str
    arch_majors: tuple[int, ...]
    formats: dict[str, KvCacheFormat]
    library: Callable[[Libraries], str | None]
    rules: tuple[Callable[[Deployment], str | None], ...]
    ours: bool


_BF16: dict[str, KvCacheFormat] = dict.fromkeys(("auto", "bfloat16"), "bfloat16")
_FP8: dict[str, KvCacheFormat] = dict.fromkeys(("fp8", "fp8_e4m3"), "fp8_e4m3")
_DS_MLA: dict[str, KvCacheFormat] = {
    "fp8": "fp8_ds_mla",
    "fp8_ds_mla": "fp8_ds_mla",
    "nvfp4_ds_mla": "nvfp4_ds_mla",
}


def _flashinfer_library(libraries: Libraries) -> str | None:
    found, oldest = libraries.flashinfer, MIN_FLASHINFER
    if found is None:
        return f"FlashInfer is not installed; install the one that vLLM pins ({oldest} or newer)"
    if Version(found) < Version(oldest):
        return f"FlashInfer {found} returns no LSE here; {oldest} or newer is needed"
    return None


def _flash_attn_4_library(libraries: Libraries) -> str | None:
    if not libraries.flash_attn_4:
        return "FlashAttention 4 is not usable with this vLLM build"
    return _flashinfer_library(libraries)


def _flashmla_library(libraries: Libraries) -> str | None:
    if libraries.flashmla:
        return None
    return "this vLLM was built without FlashMLA (vllm._flashmla_C is missing)"


def _no_pcp_with_dcp(d: Deployment) -> str | None:
    if d.pcp == 1:
        return None
    return (
        f"prefill and decode context parallelism together (got pcp {d.pcp}, dcp {d.dcp}) are not "
        "served by this backend yet"
    )


def _trtllm_gen_heads(d: Deployment) -> str | None:
    if not 64 < d.kernel_heads < 128:
        return None
    return f"trtllm-gen has no kernel for 65 to 127 query heads, got {d.kernel_heads}"


def _trtllm_gen_dims(d: Deployment) -> str | None:
    m = d.dims
    if m.index_topk is None:
        return "the model has no index_topk: sparse MLA needs a model with an indexer"
    if m.kv_lora_rank != 512:
        return f"kv_lora_rank must be 512, got {m.kv_lora_rank}"
    if m.qk_rope_head_dim == 0 and m.qk_nope_head_dim != 256:
        return f"without rope, qk_nope_head_dim must be 256, got {m.qk_nope_head_dim}"
    if m.qk_rope_head_dim not in (0, 64):
        return f"qk_rope_head_dim must be 64 or 0, got {m.qk_rope_head_dim}"
    if m.qk_rope_head_dim and m.qk_nope_head_dim not in (128, 192):
        return f"qk_nope_head_dim must be 128 or 192, got {m.qk_nope_head_dim}"
    return None


def _flash_attn_4_shape(d: Deployment) -> str | None:
    m = d.dims
    if m.index_topk is None or m.index_topk % 128:
        return f"index_topk must be a multiple of 128, got {m.index_topk}"
    if (m.kv_lora_rank, m.qk_rope_head_dim) != (512, 64):
        return (
            "kv_lora_rank and qk_rope_head_dim must be 512 and 64, got "
            f"{m.kv_lora_rank} and {m.qk_rope_head_dim}"
        )
    if d.kernel_heads not in (8, 16, 32, 64):
        return f"the kernel takes 8, 16, 32 or 64 gathered query heads, got {d.kernel_heads}"
    return None


def _flashmla_cache(d: Deployment) -> str | None:
    if d.kv_cache_dtype in _BF16:
        return f"FlashMLA serves DCP from an fp8_ds_mla cache only, got {d.kv_cache_dtype}"
    cache = _DS_MLA.get(d.kv_cache_dtype)
    if cache == "nvfp4_ds_mla" and d.arch[0] != 10:
        return f"an nvfp4_ds_mla cache needs SM100, got {arch_name(d.arch)}"
    if d.pcp > 1 and cache == "nvfp4_ds_mla":
        return f"PCP with DCP gathers an fp8_ds_mla cache, got {d.kv_cache_dtype}"
    return None


def _flashmla_heads(d: Deployment) -> str | None:
    if d.pcp == 1 and d.heads_per_rank >= 32:
        return (
            f"FlashMLA serves DCP with fewer than 32 query heads a rank, got {d.heads_per_rank} "
            "(its other path returns the LSE of decode tokens only)"
        )
    if (d.heads_per_rank <= 64) != (d.kernel_heads <= 64):
        return (
            f"FlashMLA pads {d.heads_per_rank} local heads to 64 and {d.kernel_heads} gathered "
            "heads to 128, and DCP needs both alike"
        )
    return None


def _ag_rs_with_pcp(d: Deployment) -> str | None:
    if d.pcp == 1 or d.comm == "ag_rs":
        return None
    return f"PCP with DCP needs --dcp-comm-backend ag_rs, got {d.comm}"


#: In the order in which a suggestion prefers them.
TABLE: tuple[BackendRow, ...] = (
    BackendRow(
        FLASHINFER,
        (10,),
        _BF16 | {"float16": "bfloat16"} | _FP8,
        _flashinfer_library,
        (_no_pcp_with_dcp, _trtllm_gen_heads, _trtllm_gen_dims),
        ours=True,
    ),
    BackendRow(
        FLASH_ATTN_4,
        (10,),
        _BF16,
        _flash_attn_4_library,
        (_no_pcp_with_dcp, _trtllm_gen_dims, _flash_attn_4_shape),
        ours=True,
    ),
    BackendRow(
        FLASHMLA,
        (9, 10),
        # bf16 is named by the rule, which says why.
        _DS_MLA | _BF16,
        _flashmla_library,
        (_flashmla_cache, _flashmla_heads, _ag_rs_with_pcp),
        ours=False,
    ),
)


def arch_name(arch: tuple[int, int]) -> str:
    """``(10, 0)`` as ``SM100``."""
    return f"SM{arch[0]}{arch[1]}"


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

    The nearest change wins: DCP and PCP stay if they can, then the cache dtype, then the exchange.
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
        )
        if best is None or distance < best[0]:
            best = (distance, other, name)
    if best is None:
        return None
    _, other, name = best
    changes = [
        f"{flag} {getattr(other, field)}"
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
                    yield from dict.fromkeys((other, replace(other, interleave=1)))


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
