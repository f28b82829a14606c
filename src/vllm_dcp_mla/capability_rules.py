"""Why a backend does not serve a deployment: one function a reason, for :mod:`.capability`'s table.

A rule gets a deployment with ``dcp > 1`` and answers with its reason, or None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from packaging.version import Version

if TYPE_CHECKING:
    from .capability import Deployment, Libraries

Library = Callable[["Libraries"], str | None]
Rules = tuple[Callable[["Deployment"], str | None], ...]
KvCacheFormat = Literal["bfloat16", "fp8_e4m3", "fp8_ds_mla", "nvfp4_ds_mla"]

#: The oldest FlashInfer whose sparse MLA decode returns an LSE.
MIN_FLASHINFER = "0.6.14"
#: Query heads that ``flash_mla_sparse_fwd`` has a kernel for on SM90, and the keys it takes a
#: multiple of.
FLASHMLA_SPARSE_HEADS = (8, 16, 32, 64, 128)
FLASHMLA_TOPK_MULTIPLE = 128

BF16: dict[str, KvCacheFormat] = dict.fromkeys(("auto", "bfloat16"), "bfloat16")
FP8: dict[str, KvCacheFormat] = dict.fromkeys(("fp8", "fp8_e4m3"), "fp8_e4m3")
DS_MLA: dict[str, KvCacheFormat] = {
    "fp8": "fp8_ds_mla",
    "fp8_ds_mla": "fp8_ds_mla",
    "nvfp4_ds_mla": "nvfp4_ds_mla",
}


def arch_name(arch: tuple[int, int]) -> str:
    """``(10, 0)`` as ``SM100``."""
    return f"SM{arch[0]}{arch[1]}"


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


def trtllm_gen_heads(heads: int) -> str | None:
    """Why trtllm-gen takes no launch of a number of query heads, None when it does."""
    if not 64 < heads < 128:
        return None
    return f"trtllm-gen has no kernel for 65 to 127 query heads, got {heads}"


def _trtllm_gen_heads(d: Deployment) -> str | None:
    return next(filter(None, map(trtllm_gen_heads, d.launch_heads)), None)


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
    if d.kv_cache_dtype in BF16:
        return f"FlashMLA serves DCP from an fp8_ds_mla cache only, got {d.kv_cache_dtype}"
    cache = DS_MLA.get(d.kv_cache_dtype)
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


def _hopper_dims(d: Deployment) -> str | None:
    m = d.dims
    if m.index_topk is None:
        return "the model has no index_topk: sparse MLA needs a model with an indexer"
    if m.kv_lora_rank != 512 or m.qk_rope_head_dim not in (0, 64):
        return (
            "kv_lora_rank must be 512 and qk_rope_head_dim 64 or 0, got "
            f"{m.kv_lora_rank} and {m.qk_rope_head_dim}"
        )
    return None


def _forced_hopper_kernel(d: Deployment) -> str | None:
    if d.kernel not in ("flashmla", "flash_attn3"):
        return None
    if d.kv_cache_dtype not in BF16:
        return f"the forced kernel {d.kernel} reads a bf16 cache, got {d.kv_cache_dtype}"
    if d.dims.qk_rope_head_dim != 64:
        return f"the forced kernel {d.kernel} needs rotary dims, got none"
    if d.kernel == "flash_attn3":
        missing = "this vLLM was built without FlashAttention 3 (_vllm_fa3_C is missing)"
        return None if d.libraries.flash_attn_3 else missing
    if not d.libraries.flashmla:
        return _flashmla_library(d.libraries)
    for heads in d.launch_heads:
        if heads not in FLASHMLA_SPARSE_HEADS:
            known = ", ".join(map(str, FLASHMLA_SPARSE_HEADS))
            return f"the forced kernel flashmla takes {known} heads a launch, got {heads}"
    if (d.dims.index_topk or 0) % FLASHMLA_TOPK_MULTIPLE:
        return (
            f"the forced kernel flashmla takes an index_topk that is a multiple of "
            f"{FLASHMLA_TOPK_MULTIPLE}, got {d.dims.index_topk}"
        )
    return None


def _ag_rs_with_pcp(d: Deployment) -> str | None:
    if d.pcp == 1 or d.comm == "ag_rs":
        return None
    return f"PCP with DCP needs --dcp-comm-backend ag_rs, got {d.comm}"


#: By backend: why its library is missing, and its further reasons.
FLASHINFER_LIBRARY: Library = _flashinfer_library
FLASHINFER_RULES: Rules = (_ag_rs_with_pcp, _trtllm_gen_heads, _trtllm_gen_dims)
FLASH_ATTN_4_LIBRARY: Library = _flash_attn_4_library
FLASH_ATTN_4_RULES: Rules = (_ag_rs_with_pcp, _trtllm_gen_dims, _flash_attn_4_shape)
HOPPER_RULES: Rules = (_ag_rs_with_pcp, _hopper_dims, _forced_hopper_kernel)
FLASHMLA_LIBRARY: Library = _flashmla_library
FLASHMLA_RULES: Rules = (_flashmla_cache, _flashmla_heads, _ag_rs_with_pcp)
