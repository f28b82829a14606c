"""Which of vLLM's kernel libraries are here, found by file: nothing of them is imported."""

from __future__ import annotations

from pathlib import Path

from ..capability import Libraries
from .installed import installed_version, package_folder
from .releases import installed_release

#: Assumed where vLLM is not installed, as on a laptop: all that vLLM 0.33 ships with.
ASSUMED = Libraries(flashinfer="0.7.2.post1", flashmla=True, flash_attn_4=True, flash_attn_3=True)
FLASHMLA_MODULES = ("_flashmla_C", "_flashmla_extension_C")


def libraries_here() -> Libraries:
    """The libraries beside the installed vLLM, or :data:`ASSUMED` without one."""
    vllm = package_folder("vllm")
    if vllm is None:
        return ASSUMED
    return Libraries(
        flashinfer=installed_version("flashinfer-python") if package_folder("flashinfer") else None,
        flashmla=not missing_flashmla_modules(vllm),
        flash_attn_4=(vllm / "vllm_flash_attn" / "cute").is_dir()
        and package_folder("cutlass") is not None,
        flash_attn_3=has_flash_attn_3(vllm),
        release=installed_release(),
    )


def has_flash_attn_3(vllm: Path) -> bool:
    """Whether a vLLM folder has FlashAttention 3's extension module."""
    return any((vllm / "vllm_flash_attn").glob("_vllm_fa3_C*.so"))


def missing_flashmla_modules(vllm: Path) -> list[str]:
    """FlashMLA's extension modules that a vLLM folder lacks."""
    return [name for name in FLASHMLA_MODULES if not any(vllm.glob(f"{name}*.so"))]
