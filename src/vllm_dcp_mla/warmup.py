"""Has vLLM compile kernels before it serves; only where it does that itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry

if TYPE_CHECKING:
    import torch


def warm(vllm_config: Any, device: torch.device, kernel: Any, *args: Any, **kwargs: Any) -> None:
    """Has a kernel's variants compiled, at once where vLLM does not collect warm-ups.

    vLLM collects them in some runners and modes only; elsewhere nothing else compiles ours.

    Args:
        vllm_config: the engine's configuration.
        device: where the kernel will run.
        kernel: a ``VllmJitKernel``.
        args, kwargs: those of its ``get_warmup_keys``.
    """
    if vllm_config.kernel_config.enable_jit_warmup and JitWarmupRegistry._active.get() is not None:
        kernel.register_warmup(*args, **kwargs)
    elif device.type == "cuda":
        kernel.warmup(*args, **kwargs)
