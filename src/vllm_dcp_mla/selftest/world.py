"""N ranks on one machine: forked from a process that has imported vLLM, joined over gloo."""

from __future__ import annotations

import faulthandler
import inspect
import logging
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..models import load_config

if TYPE_CHECKING:
    import torch

    from ..settings import KernelName

MODEL = "glm-5.2"
MODEL_LEN = 8192
MAX_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Sizes:
    """vLLM's parallel sizes."""

    tp: int
    pcp: int
    dcp: int

    @property
    def num_ranks(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tp * self.pcp

    @property
    def heads(self) -> int:
        """Query heads of the model: two on each TP rank at least."""
        return max(4, 2 * self.tp)

    def __str__(self) -> str:
        pcp = f" PCP{self.pcp}" if self.pcp > 1 else ""
        return f"TP{self.tp}{pcp} DCP{self.dcp}"


def model_heads() -> int:
    """Query heads of the model that vLLM is configured for; it refuses a TP that divides them not.

    Fewer run, see :attr:`Sizes.heads`.
    """
    return int(load_config(MODEL)["num_attention_heads"])


class RankError(RuntimeError):
    """A rank raised, died, or did not finish in time; the message names it."""


class NoDeviceError(RuntimeError):
    """The device asked for is not on this machine."""


def prepare(device_type: str) -> None:
    """Imports vLLM with its CPU platform; once, before ranks are forked.

    One import takes many seconds and a gigabyte, which forked ranks share. On ``cpu``, Triton
    kernels run interpreted; on ``cuda`` they are compiled and tensors are the GPU's, while the
    collectives stay gloo's, so that ranks may share a GPU.

    Args:
        device_type: ``cpu`` or ``cuda``.

    Raises:
        NoDeviceError: ``cuda`` without a GPU.
    """
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        # Symmetric memory needs a GPU for each rank, and NVLink.
        VLLM_USE_DIRECT_DCP_A2A="0",
        VLLM_USE_DIRECT_DCP_Q_GATHER="0",
        # Looking for GPUs must not start CUDA here: a forked process could not start it again.
        PYTORCH_NVML_BASED_CUDA_CHECK="1",
    )
    if device_type == "cpu":
        # Threads of NumPy's small products, in every rank, took ten times as long as one.
        os.environ.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="", OPENBLAS_NUM_THREADS="1")
    for noisy in ("vllm", "torch"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    from ..simulate import driver

    driver.ensure_loaded()
    import torch

    if device_type == "cuda" and not torch.cuda.is_available():
        raise NoDeviceError(
            "--device is cuda, but torch sees no GPU on this machine; run nvidia-smi and look at "
            "CUDA_VISIBLE_DEVICES, or use --device cpu."
        )
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    torch.set_num_threads(1)  # a forked child cannot use its parent's thread pool
    vllm.platforms._current_platform = CpuPlatform()
    from vllm.utils import torch_utils

    # Some releases ask about pinned memory while that import runs, of no platform yet.
    torch_utils.PIN_MEMORY = CpuPlatform.is_pin_memory_available()
    from ..plugin import register

    register()
    import vllm.model_executor.models.deepseek_v2

    from ..indexer import hooks
    from . import subjects

    for subject in subjects.served():
        subject.backend()
    hooks.install()
    if device_type == "cpu":
        _complete_interpreted_merge()
        _give_interpreter_bf16_products()


def _complete_interpreted_merge() -> None:
    """Gives vLLM's interpreted merge kernel the one attribute that only compiled kernels have."""
    from vllm.v1.attention.ops import dcp

    wrapper = getattr(dcp, "CorrectAttnCPOutKernel", None)
    if wrapper is None:  # vLLM 0.29 launches the kernel without looking into it
        return
    kernel: Any = wrapper.kernel
    parameters = inspect.signature(kernel.fn).parameters.values()
    kernel.constexprs = [i for i, p in enumerate(parameters) if "constexpr" in str(p.annotation)]


def _give_interpreter_bf16_products() -> None:
    """Makes ``tl.dot`` of bf16 right, whose bit patterns Triton's interpreter multiplies."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    stock = interpreter.InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        data = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(data, tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return stock(self, widened(a), widened(b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


def place(rank: int, device_type: str) -> torch.device:
    """The device of a rank, made current; ranks beyond the number of GPUs share them."""
    import torch

    if device_type == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def run_ranks(
    num_ranks: int,
    work: Callable[..., Any],
    *args: Any,
    timeout_s: float = 300,
) -> list[Any]:
    """Runs ``work(rank, num_ranks, *args)`` on every rank; its results in rank order.

    Raises:
        RankError: a rank failed; the others are stopped.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(num_ranks):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(theirs, rank, num_ranks, Path(folder), work, args)
            )
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        try:
            return _collect(pipes, processes, timeout_s)
        finally:
            for process in processes:
                if process.is_alive():
                    process.terminate()
                process.join()


def _collect(pipes: list[Any], processes: list[Any], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [rank for rank in range(len(pipes)) if rank not in results]
        left = deadline - time.monotonic()
        ready = multiprocessing.connection.wait([pipes[rank] for rank in waiting], max(left, 0))
        if not ready:
            raise RankError(f"ranks {waiting} did not finish within {timeout_s:.0f} s")
        for rank in waiting:
            if pipes[rank] not in ready:
                continue
            try:
                ok, value = pipes[rank].recv()
            except EOFError:
                processes[rank].join()
                raise RankError(
                    f"rank {rank} died with exit status {processes[rank].exitcode}"
                ) from None
            if not ok:
                raise RankError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    pipe: Any,
    rank: int,
    num_ranks: int,
    folder: Path,
    work: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    faulthandler.enable()
    # The Triton interpreter computes log(0) of empty rows with numpy, which warns.
    warnings.simplefilter("ignore")
    try:
        pipe.send((True, work(rank, num_ranks, folder, *args)))
    except BaseException:  # noqa: BLE001  (reported by the parent, whatever it is)
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()


def engine_config(
    model_config: dict[str, Any],
    num_ranks: int,
    dcp: int,
    comm: str,
    kernel: KernelName = "reference",
    *,
    pcp: int = 1,
    **settings: Any,
) -> Any:
    """A ``VllmConfig`` of one rank.

    Args:
        model_config: the model's ``config.json``.
        num_ranks: ranks of a tensor parallel group.
        dcp: ranks of a DCP group.
        comm: ``--dcp-comm-backend``.
        kernel: the setting ``kernel``.
        pcp: ranks of a PCP group.
        settings: further settings of the package.
    """
    import json

    from vllm.engine.arg_utils import EngineArgs

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model_config))
        config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            tensor_parallel_size=num_ranks,
            prefill_context_parallel_size=pcp,
            decode_context_parallel_size=dcp,
            dcp_comm_backend=comm,
            max_model_len=MODEL_LEN,
            max_num_batched_tokens=MAX_TOKENS,
            max_num_seqs=16,
            distributed_executor_backend="external_launcher",
            enforce_eager=True,
            additional_config={"dcp_mla": {"kernel": kernel, **settings}},
        ).create_engine_config()
    config.cache_config.block_size = 64  # the CPU platform overrules it for its own backend
    return config


def join(rank: int, sizes: Sizes, folder: Path) -> Any:
    """Joins the process groups; returns vLLM's DCP group. The configuration must be current."""
    from vllm.distributed import parallel_state

    parallel_state.init_distributed_environment(
        world_size=sizes.num_ranks,
        rank=rank,
        local_rank=rank,
        distributed_init_method=f"file://{folder}/rendezvous",
        backend="gloo",
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        prefill_context_model_parallel_size=sizes.pcp,
        decode_context_model_parallel_size=sizes.dcp,
    )
    return parallel_state.get_dcp_group()


def leave() -> None:
    """Leaves the process group, so that its shared memory goes with it."""
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
