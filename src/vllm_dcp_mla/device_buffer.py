"""The workspaces of a CUDA device: made while the model loads, never moved, never re-made.

CUDA graphs keep their addresses, and every layer, drafter and engine of a process shares them in
stream order. trtllm-gen has one, Hopper's kernels another for keys that are split, and PCP with DCP
gathers keys in a third. A later caller who would want more plans against what is there and splits
finer.
"""

from __future__ import annotations

import logging

import torch

from .gather_plan import GatherPlan, plan_gather
from .kernels.base import LaunchBuffers
from .key_splits import arrival_bytes, partial_bytes
from .workspace import WorkspacePlan, plan_workspace

logger = logging.getLogger("vllm.dcp_mla.workspace")

_BY_DEVICE: dict[torch.device, LaunchBuffers] = {}
_PARTIALS: dict[torch.device, LaunchBuffers] = {}
_GATHERED: dict[torch.device, torch.Tensor] = {}


def kernel_device() -> torch.device:
    """Where attention will run: the current CUDA device by number, or the CPU without CUDA.

    torch's default device says nothing here; vLLM sets it to meta or cpu while it loads weights.
    """
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def acquire(
    device: torch.device,
    num_heads: int,
    max_num_tokens: int,
    *,
    slab_limit_bytes: int,
    workspace_bytes: int | None = None,
) -> tuple[LaunchBuffers, WorkspacePlan]:
    """The device's buffers, made by the first caller, and how this caller's launches use them.

    Args:
        device: an explicit device; ``cuda`` without a number is refused.
        num_heads: query heads of the caller's launches.
        max_num_tokens: most tokens of a step.
        slab_limit_bytes: most bytes of softmax statistics.
        workspace_bytes: the user's size; only the first caller's counts.

    Raises:
        ValueError: not one token fits; the message names the bytes needed.
    """
    if device.type == "cuda" and device.index is None:
        raise ValueError(f"device is {device}; name its number, such as cuda:0")
    buffers = _BY_DEVICE.get(device)
    if buffers is not None:
        workspace_bytes = buffers.workspace.numel()
    plan = plan_workspace(
        num_heads,
        max_num_tokens,
        slab_limit_bytes=slab_limit_bytes,
        workspace_bytes=workspace_bytes,
    )
    if buffers is None:
        buffers = _BY_DEVICE[device] = _allocate(device, plan)
        logger.info(
            "Attention workspace on %s: %s bytes (%.3f GiB), %d tokens a launch at %d heads.",
            device,
            f"{plan.total_bytes:,}",
            plan.total_bytes / 2**30,
            plan.tokens_per_launch,
            num_heads,
        )
    return buffers, plan


def acquire_partials(device: torch.device, latent_dim: int) -> LaunchBuffers:
    """The device's memory for launches that split keys, made by the first caller.

    Partial results lie there, and copies of the queries for a kernel that does not split by itself.
    Its size follows from the device and the latent dim alone, so that it suffices for every launch.

    Args:
        device: an explicit device.
        latent_dim: elements of a result.

    Raises:
        ValueError: a latent dim larger than the first caller's.
    """
    sms = num_sms(device)
    size = partial_bytes(latent_dim, sms)
    buffers = _PARTIALS.get(device)
    if buffers is not None and size > buffers.workspace.numel():
        raise ValueError(
            f"partial results of {latent_dim} latent dims need {size} bytes, but a model of fewer "
            f"made {buffers.workspace.numel()} on {device}; serve the models from two processes."
        )
    if buffers is None:
        buffers = _PARTIALS[device] = LaunchBuffers(
            workspace=torch.empty(size, dtype=torch.int8, device=device),
            counters=torch.zeros(arrival_bytes(sms), dtype=torch.uint8, device=device),
        )
        logger.info(
            "Attention workspace on %s: %s bytes (%.3f GiB) for partial results.",
            device,
            f"{size:,}",
            size / 2**30,
        )
    return buffers


def acquire_gather(device: torch.device, **sizes: int) -> tuple[torch.Tensor, GatherPlan]:
    """The device's memory for gathered keys, made by the first caller, and how it is used.

    Args:
        device: an explicit device.
        sizes: arguments of :func:`.gather_plan.plan_gather`, without ``workspace_bytes``.

    Returns:
        A ``uint8`` tensor and its plan.

    Raises:
        ValueError: not one turn of the interleave fits; the message names the bytes needed.
    """
    buffer = _GATHERED.get(device)
    plan = plan_gather(**sizes)
    if buffer is not None and plan.total_bytes > buffer.numel():
        plan = plan_gather(**sizes, workspace_bytes=buffer.numel())
    if buffer is None:
        buffer = torch.empty(plan.total_bytes, dtype=torch.uint8, device=device)
        _GATHERED[device] = buffer
        logger.info(
            "Gather workspace on %s: %s bytes (%.3f GiB), contexts of %d tokens in one range.",
            device,
            f"{plan.total_bytes:,}",
            plan.total_bytes / 2**30,
            plan.rows_per_rank * sizes["dcp"],
        )
    return buffer, plan


def held() -> list[tuple[str, torch.Tensor]]:
    """Every buffer of this process, with its name: a pair each, of all devices."""
    return [
        *(("workspace", buffers.workspace) for buffers in _BY_DEVICE.values()),
        *(("counters", buffers.counters) for buffers in _BY_DEVICE.values()),
        *(("partial results", buffers.workspace) for buffers in _PARTIALS.values()),
        *(("arrivals", buffers.counters) for buffers in _PARTIALS.values()),
        *(("gathered keys", buffer) for buffer in _GATHERED.values()),
    ]


def num_sms(device: torch.device) -> int:
    """Multiprocessors of a device; a CPU counts as 4, so that keys are split there too."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def zero_all() -> None:
    """Zeroes again what kernels expect to be zero: sleep mode may have dropped it in between."""
    for device, buffers in _BY_DEVICE.items():
        buffers.workspace.zero_()
        buffers.counters.zero_()
        _wait(device)
    for device, buffers in _PARTIALS.items():
        buffers.counters.zero_()
        _wait(device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _allocate(device: torch.device, plan: WorkspacePlan) -> LaunchBuffers:
    return LaunchBuffers(
        workspace=torch.zeros(plan.total_bytes, dtype=torch.int8, device=device),
        counters=torch.zeros(plan.counter_bytes(num_sms(device)), dtype=torch.uint8, device=device),
    )
