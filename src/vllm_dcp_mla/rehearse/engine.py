"""One engine of a rehearsal: stock vLLM's arguments and environment, without vLLM."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from ..settings import KernelChoice

Graphs = Literal["none", "piecewise", "full"]
GRAPHS = ("none", "piecewise", "full")

#: KV cache of a rank where several share a GPU: the budget cannot be profiled there.
SHARED_KV_CACHE_BYTES = 2 << 30
#: vLLM refuses to start with less free memory than this share, also where it sizes nothing by it.
SHARED_UTILIZATION = 0.05
MAX_NUM_SEQS = 8
#: Acceptance of the first, second, ... drafted token when MTP is rehearsed.
_ACCEPTANCE = 0.5

#: Modes of ``cudagraph_mode``. ``--enforce-eager`` would turn vLLM's warm-up and monitor off too.
_CUDAGRAPH_MODES = {"none": "NONE", "piecewise": "PIECEWISE", "full": "FULL_DECODE_ONLY"}


class EngineSpec(BaseModel):
    """One engine.

    Attributes:
        name: unique in a rehearsal; names its files.
        model: folder of the checkpoint.
        tp, pcp, dcp: parallel sizes; ``tp * pcp`` ranks.
        kv_cache_dtype: vLLM's ``--kv-cache-dtype``.
        comm: ``--dcp-comm-backend``, None to leave it out.
        mtp: speculative tokens.
        graphs: CUDA graphs.
        backend: ``--attention-backend``, None to let vLLM select.
        kernel: the package's setting of that name.
        force_mqa: keep short prompts off the dense prefill path.
        strict: whether a late compilation or a wait for the GPU of ours stops the engine.
        shared: whether ranks share a GPU.
        whole_gpu: whether a kernel runs that needs all multiprocessors at once. A collective of
            another rank on them, which waits for this one, would never let it start: ranks that
            share a GPU take turns then.
        max_model_len, max_num_batched_tokens: vLLM's limits, in tokens.
        kv_cache_bytes: of a rank; None where vLLM's profiling decides.
        utilization: ``--gpu-memory-utilization`` where ``kv_cache_bytes`` is None.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    model: str
    tp: int = 1
    pcp: int = 1
    dcp: int = 1
    kv_cache_dtype: str = "auto"
    comm: str | None = None
    mtp: int = 0
    graphs: Graphs = "none"
    backend: str | None = None
    kernel: KernelChoice = "auto"
    force_mqa: bool = True
    strict: bool = False
    shared: bool = False
    whole_gpu: bool = False
    max_model_len: int
    max_num_batched_tokens: int
    kv_cache_bytes: int | None
    utilization: float

    @property
    def world(self) -> int:
        """Ranks, one process each."""
        return self.tp * self.pcp


def llm_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM``."""
    arguments: dict[str, Any] = {
        "model": spec.model,
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "tensor_parallel_size": spec.tp,
        "decode_context_parallel_size": spec.dcp,
        "disable_custom_all_reduce": True,
        "kv_cache_dtype": spec.kv_cache_dtype,
        "gpu_memory_utilization": spec.utilization,
        "max_model_len": spec.max_model_len,
        "max_num_batched_tokens": spec.max_num_batched_tokens,
        "max_num_seqs": MAX_NUM_SEQS,
        "seed": 0,
        "disable_log_stats": False,
        "max_logprobs": -1,
        "enable_prefix_caching": True,
        "jit_monitor_mode": "error" if spec.strict else "warn",
        "compilation_config": {"mode": 0, "cudagraph_mode": _CUDAGRAPH_MODES[spec.graphs]},
        "attention_config": {"sparse_mla_force_mqa": spec.force_mqa},
        "additional_config": {"dcp_mla": {"kernel": spec.kernel}},
    }
    if spec.kv_cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = spec.kv_cache_bytes
    if spec.world > 1:
        arguments["distributed_executor_backend"] = "external_launcher"
    if spec.shared:
        # What it times there are other ranks' kernels, and TP2 has failed in it.
        arguments["enable_flashinfer_autotune"] = False
    if spec.pcp > 1:
        arguments["prefill_context_parallel_size"] = spec.pcp
    if spec.comm is not None and spec.dcp > 1:
        arguments["dcp_comm_backend"] = spec.comm
    if spec.backend is not None:
        arguments["attention_backend"] = spec.backend
    if spec.mtp:
        arguments["speculative_config"] = {
            "method": "mtp",
            "num_speculative_tokens": spec.mtp,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [_ACCEPTANCE ** (i + 1) for i in range(spec.mtp)],
            **({"attention_backend": spec.backend} if spec.backend is not None else {}),
        }
    return arguments


def environment(spec: EngineSpec, rank: int, local_rank: int, port: int) -> dict[str, str]:
    """Variables of one rank, on top of the caller's.

    Args:
        spec: the engine.
        rank: of ``spec.world``.
        local_rank: number of the GPU.
        port: of the ranks' rendezvous on the loopback interface.
    """
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(spec.world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "VLLM_HOST_IP": "127.0.0.1",
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        # Compiling FlashInfer's sampler takes minutes, and only greedy tokens are asked for.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    if spec.graphs == "piecewise":
        # These models are not torch-compiled: piecewise graphs are vLLM's breakable ones.
        variables["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"
    if spec.strict:
        variables["VLLM_GPU_SYNC_CHECK"] = "error"
    if spec.shared:
        variables |= SHARED_ENVIRONMENT
    return variables


#: Where ranks share a GPU: NCCL 2.30's switch for it, few blocks for its kernels, and neither
#: symmetric memory nor multicast, which need a GPU a rank.
SHARED_ENVIRONMENT = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "4",
    "VLLM_USE_DIRECT_DCP_A2A": "0",
    "VLLM_USE_DIRECT_DCP_Q_GATHER": "0",
}
