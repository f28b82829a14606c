"""Kernel libraries beside vLLM, and this machine's GPU."""

from __future__ import annotations

from ..capability_rules import arch_name
from ..compat.installed import package_folder
from ..compat.libraries import has_flash_attn_3, missing_flashmla_modules
from ..planner import local_gpu
from .processes import Probed
from .report import Check
from .versions import INSTALL_VLLM

_GIB = 1 << 30


def check_libraries() -> list[Check]:
    """DeepGEMM, CuteDSL, FlashMLA and FlashAttention 3, by file."""
    return [_check_deep_gemm(), _check_cute_dsl(), _check_flashmla(), _check_flash_attn_3()]


def _check_deep_gemm() -> Check:
    name, expected = "DeepGEMM", "present: the indexer needs it"
    if package_folder("deep_gemm") is not None:
        return Check(name, "pass", "the package deep_gemm", expected)
    vllm = package_folder("vllm")
    if vllm is not None and (vllm / "third_party" / "deep_gemm" / "__init__.py").is_file():
        return Check(name, "pass", "vLLM's own copy", expected)
    return Check(name, "fail", "missing", expected, f"{INSTALL_VLLM} (its wheel has a copy)")


def _check_cute_dsl() -> Check:
    name, expected = "CuteDSL", "present: the merge of top-k rows needs it"
    if package_folder("cutlass") is not None:
        return Check(name, "pass", "the package cutlass", expected)
    return Check(name, "fail", "missing", expected, "pip install nvidia-cutlass-dsl")


def _check_flashmla() -> Check:
    name, expected = "FlashMLA", "present: FLASHMLA_SPARSE needs it, and Hopper for large steps"
    vllm = package_folder("vllm")
    if vllm is None:
        return Check(name, "warn", "vLLM is not installed", expected, INSTALL_VLLM)
    missing = missing_flashmla_modules(vllm)
    if missing:
        found = f"this vLLM lacks {', '.join(missing)}"
        return Check(name, "warn", found, expected, "install a vLLM wheel that was built with it")
    return Check(name, "pass", "vLLM's extension modules are there", expected)


def _check_flash_attn_3() -> Check:
    name, expected = "FlashAttention 3", "present: Hopper uses it for large steps without FlashMLA"
    vllm = package_folder("vllm")
    if vllm is None:
        return Check(name, "warn", "vLLM is not installed", expected, INSTALL_VLLM)
    if not has_flash_attn_3(vllm):
        fix = "install a vLLM wheel that was built with it"
        return Check(name, "warn", "this vLLM lacks _vllm_fa3_C", expected, fix)
    return Check(name, "pass", "vLLM's extension module is there", expected)


def check_torch(probed: Probed) -> Check:
    """Whether torch imports in a fresh process."""
    name, expected = "torch imports", "torch, built for CUDA"
    torch = probed.sections.get("torch")
    if torch is None:
        fix = "install the torch that vLLM pins"
        return Check(name, "fail", probed.error or "it said nothing", expected, fix)
    if torch["cuda_build"] is None:
        fix = "install vLLM's CUDA wheel with its torch"
        return Check(name, "fail", "a torch without CUDA", expected, fix)
    return Check(name, "pass", f"built for CUDA {torch['cuda_build']}", expected)


def check_gpu(probed: Probed) -> Check:
    """This machine's first GPU, and whether torch can use it."""
    name, expected = "GPU", "a GPU of SM9x or SM10x that torch can use"
    try:
        gpu = local_gpu.detect()
    except local_gpu.NoGpuError as error:
        fix = "run doctor again where vLLM will run"
        return Check(name, "warn", f"no GPU here: {error}", expected, fix)
    found = (
        f"{gpu.name}, {arch_name(gpu.arch)}, {gpu.memory_bytes / _GIB:.0f} GiB; "
        f"{local_gpu.kernel_module() or 'driver version unknown'}"
    )
    torch = probed.sections.get("torch")
    if torch is not None and not torch["cuda_available"]:
        fix = f"install a driver that runs CUDA {torch['cuda_build']}"
        return Check(name, "fail", f"{found}; torch.cuda is not available", expected, fix)
    if gpu.arch[0] not in (9, 10):
        return Check(name, "warn", found, expected, "nothing serves DCP with sparse MLA on it")
    return Check(name, "pass", found, expected)
