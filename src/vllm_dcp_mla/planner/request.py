"""What a user asked for on the command line: read, checked, every problem one sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..capability import TABLE, Deployment, Libraries, ModelDims
from ..models import ModelConfigError, UnservedModelError, load_config
from ..settings import KernelChoice
from ..simulate.gpus import GPUS, Gpu
from ..topology import check_topology
from . import local_gpu
from .defaults import resolve_comm, resolve_kv_cache_dtype
from .model_spec import ModelSpec
from .workload import Workload

LOCAL = "local"
COMMS = ("ag_rs", "a2a")
KV_CACHE_DTYPES = tuple(sorted({name for row in TABLE for name in row.formats}))
#: Ranks that hold one copy of a model; the search for a working neighbour grows with them.
MAX_RANKS = 1024
#: vLLM counts the tokens of a step in int32.
MAX_TOKENS = (1 << 31) - 1
#: vLLM's own default on large GPUs, capped by the tokens of a step.
DEFAULT_MAX_NUM_SEQS = 1024
DEFAULT_UTILIZATION = "0.92"
DEFAULT_BLOCK_SIZE = "64"
#: The indexer's kernels read pages of this many tokens.
_BLOCK_MULTIPLE = 64
_MAX_SPEC_TOKENS = 16
_MAX_GIB = 1 << 16
GIB = 1 << 30

#: Understood, and impossible.
IMPOSSIBLE = 1
#: Cannot be parsed, or an unknown name.
UNREADABLE = 2


class RequestError(ValueError):
    """A request that cannot be answered.

    Attributes:
        problems: one sentence each.
        exit_code: :data:`IMPOSSIBLE` or :data:`UNREADABLE`.
    """

    def __init__(self, problems: list[str], exit_code: int) -> None:
        super().__init__(" ".join(problems))
        self.problems = problems
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class RawRequest:
    """The flags as typed; None where one was left out."""

    model: str
    gpu: str
    tp: str
    pcp: str
    dcp: str
    kv_cache_dtype: str
    max_num_batched_tokens: str
    comm: str | None
    max_model_len: str | None = None
    max_num_seqs: str | None = None
    block_size: str = DEFAULT_BLOCK_SIZE
    utilization: str = DEFAULT_UTILIZATION
    mtp: str = "0"
    context: str | None = None
    eager: bool = False
    total_gib: str | None = None
    graphs_gib: str | None = None
    autotune_gib: str | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """The flags as understood; sizes may still be impossible, see :meth:`problems`.

    Attributes:
        model: name or folder, as typed.
        config: the model's ``config.json``.
        gpu: a name of the known GPUs, or :data:`LOCAL`.
        tp, pcp, dcp: parallel sizes.
        kv_cache_dtype: as typed; see :func:`..planner.defaults.resolve_kv_cache_dtype`.
        max_num_batched_tokens: most tokens of a step.
        comm: ``--dcp-comm-backend``, None where it was left out.
        max_model_len, max_num_seqs: None where they were left out.
        block_size: tokens of a cache block on a rank.
        utilization: ``--gpu-memory-utilization``.
        mtp: ``num_speculative_tokens`` of the MTP drafter.
        context: tokens of a request for which concurrency is said; None for ``max_model_len``.
        eager: without CUDA graphs.
        total_bytes, graphs_bytes, autotune_bytes: figures that replace the known or estimated ones.
    """

    model: str
    config: Mapping[str, Any]
    gpu: str
    tp: int
    pcp: int
    dcp: int
    kv_cache_dtype: str
    max_num_batched_tokens: int
    comm: str | None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    block_size: int = int(DEFAULT_BLOCK_SIZE)
    utilization: float = float(DEFAULT_UTILIZATION)
    mtp: int = 0
    context: int | None = None
    eager: bool = False
    total_bytes: int | None = None
    graphs_bytes: int | None = None
    autotune_bytes: int | None = None

    @property
    def dims(self) -> ModelDims:
        """The model's dims."""
        return ModelDims(
            heads=self.config["num_attention_heads"],
            kv_lora_rank=self.config["kv_lora_rank"],
            qk_nope_head_dim=self.config["qk_nope_head_dim"],
            qk_rope_head_dim=self.config["qk_rope_head_dim"],
            index_topk=self.config["index_topk"],
        )

    def problems(self) -> list[str]:
        """What is impossible about the sizes, one sentence each."""
        problems = []
        if not 1 <= self.max_num_batched_tokens <= MAX_TOKENS:
            problems.append(
                f"--max-num-batched-tokens is {self.max_num_batched_tokens}, but a step has from 1 "
                f"to {MAX_TOKENS} tokens; use a number between them, such as 8192."
            )
        if max(self.tp, self.pcp, self.dcp, self.tp * self.pcp) > MAX_RANKS:
            problems.append(
                f"--tensor-parallel-size {self.tp}, --prefill-context-parallel-size {self.pcp} and "
                f"--decode-context-parallel-size {self.dcp} span more than {MAX_RANKS} ranks, the "
                "most that is considered for one copy of a model; use smaller sizes."
            )
            return problems
        return problems + check_topology(self.tp, self.pcp, self.dcp, self.dims.heads)

    def workload(self, spec: ModelSpec) -> Workload:
        """The sizes, with vLLM's defaults where they were left out."""
        return Workload(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len or spec.max_position_embeddings,
            max_num_seqs=self.max_num_seqs
            or min(DEFAULT_MAX_NUM_SEQS, self.max_num_batched_tokens),
            block_size=self.block_size,
            spec_tokens=self.mtp,
        )

    def workload_problems(self, spec: ModelSpec) -> list[str]:
        """What vLLM refuses about the sizes, one sentence each."""
        problems = []
        length, most = self.max_model_len, spec.max_position_embeddings
        if length is not None and not 1 <= length <= most:
            problems.append(
                f"--max-model-len is {length}, but this model takes 1 to {most} tokens "
                "(max_position_embeddings); use a number between them."
            )
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seqs is not None and not 1 <= seqs <= tokens:
            problems.append(
                f"--max-num-seqs is {seqs}, but a step has 1 to {tokens} requests "
                "(--max-num-batched-tokens); use a number between them."
            )
        if self.block_size < 1 or self.block_size % _BLOCK_MULTIPLE:
            problems.append(
                f"--block-size is {self.block_size}, but the indexer's kernels need a multiple of "
                f"{_BLOCK_MULTIPLE}; use {_BLOCK_MULTIPLE}."
            )
        if not 0 < self.utilization <= 1:
            problems.append(
                f"--utilization is {self.utilization:g}, but it is a share of the GPU, above 0 and "
                f"up to 1; use one such as {DEFAULT_UTILIZATION}."
            )
        if not 0 <= self.mtp <= _MAX_SPEC_TOKENS:
            problems.append(
                f"--mtp is {self.mtp}, but it is a number of draft tokens from 0 to "
                f"{_MAX_SPEC_TOKENS}; use 0 for no drafter."
            )
        elif self.mtp and not spec.mtp_layers:
            problems.append(
                f"--mtp is {self.mtp}, but the model has no MTP layer (num_nextn_predict_layers); "
                "leave it out."
            )
        longest = self.workload(spec).max_model_len
        if self.context is not None and not 1 <= self.context <= longest:
            problems.append(
                f"--context is {self.context}, but a request has 1 to {longest} tokens "
                "(--max-model-len); use a number between them."
            )
        return problems

    def other_flags(self, workload: Workload) -> list[str]:
        """The flags of ``vllm serve`` for what was given beside topology and step size."""
        flags = []
        if self.max_model_len is not None:
            flags.append(f"--max-model-len {workload.max_model_len}")
        if self.max_num_seqs is not None:
            flags.append(f"--max-num-seqs {workload.max_num_seqs}")
        if self.block_size != int(DEFAULT_BLOCK_SIZE):
            flags.append(f"--block-size {self.block_size}")
        if self.utilization != float(DEFAULT_UTILIZATION):
            flags.append(f"--gpu-memory-utilization {self.utilization:g}")
        if self.mtp:
            flags.append(
                f"--speculative-config.method mtp --speculative-config.num_speculative_tokens "
                f"{self.mtp}"
            )
        if self.eager:
            flags.append("--enforce-eager")
        return flags

    def deployment(self, gpu: Gpu, libraries: Libraries, *, kernel: KernelChoice) -> Deployment:
        """The request in the capability table's terms; its sizes must be possible.

        Args:
            gpu: the GPU it runs on.
            libraries: what is installed there.
            kernel: the setting ``kernel``.
        """
        return Deployment(
            arch=gpu.arch,
            kv_cache_dtype=resolve_kv_cache_dtype(
                self.config, self.kv_cache_dtype, gpu.arch, libraries.release
            ),
            tp=self.tp,
            pcp=self.pcp,
            dcp=self.dcp,
            comm=resolve_comm(self.config, self.comm, self.pcp, self.dcp),
            dims=self.dims,
            libraries=libraries,
            kernel=kernel,
        )


def read_request(raw: RawRequest) -> Request:
    """Reads the flags.

    Raises:
        RequestError: a flag that cannot be parsed or names nothing known, or a model that is no
            sparse MLA model.
    """
    problems: list[str] = []
    sizes = {
        flag: _read_integer(flag, text, problems)
        for flag, text in (
            ("--tp", raw.tp),
            ("--pcp", raw.pcp),
            ("--dcp", raw.dcp),
            ("--max-num-batched-tokens", raw.max_num_batched_tokens),
            ("--block-size", raw.block_size),
            ("--mtp", raw.mtp),
        )
    }
    optional = {
        flag: None if text is None else _read_integer(flag, text, problems)
        for flag, text in (
            ("--max-model-len", raw.max_model_len),
            ("--max-num-seqs", raw.max_num_seqs),
            ("--context", raw.context),
        )
    }
    utilization = read_number("--utilization", raw.utilization, problems)
    figures = {
        flag: read_gib(flag, text, problems)
        for flag, text in (
            ("--total-gib", raw.total_gib),
            ("--graphs-gib", raw.graphs_gib),
            ("--autotune-gib", raw.autotune_gib),
        )
    }
    if figures["--total-gib"] == 0 and not any(p.startswith("--total-gib") for p in problems):
        problems.append("--total-gib is 0, but a GPU has memory; give its GiB.")
    _check_name("--gpu", raw.gpu, (*GPUS, LOCAL), problems)
    _check_name("--kv-cache-dtype", raw.kv_cache_dtype, KV_CACHE_DTYPES, problems)
    if raw.comm is not None:
        _check_name("--comm", raw.comm, COMMS, problems)
    unserved: list[str] = []
    config: dict[str, Any] = {}
    try:
        config = load_config(raw.model)
    except UnservedModelError as error:
        unserved.append(str(error))
    except ModelConfigError as error:
        problems.append(str(error))
    if problems:
        raise RequestError(problems + unserved, UNREADABLE)
    if unserved:
        raise RequestError(unserved, IMPOSSIBLE)
    return Request(
        model=raw.model,
        config=config,
        gpu=raw.gpu,
        tp=sizes["--tp"],
        pcp=sizes["--pcp"],
        dcp=sizes["--dcp"],
        kv_cache_dtype=raw.kv_cache_dtype,
        max_num_batched_tokens=sizes["--max-num-batched-tokens"],
        comm=raw.comm,
        max_model_len=optional["--max-model-len"],
        max_num_seqs=optional["--max-num-seqs"],
        block_size=sizes["--block-size"],
        utilization=utilization,
        mtp=sizes["--mtp"],
        context=optional["--context"],
        eager=raw.eager,
        total_bytes=figures["--total-gib"],
        graphs_bytes=figures["--graphs-gib"],
        autotune_bytes=figures["--autotune-gib"],
    )


def find_gpu(name: str) -> Gpu:
    """The GPU of a name that :func:`read_request` let through.

    Raises:
        RequestError: ``local``, and this machine has none.
    """
    if name != LOCAL:
        return GPUS[name]
    try:
        return local_gpu.detect()
    except local_gpu.NoGpuError as error:
        raise RequestError(
            [f"--gpu is {LOCAL}, but {error}; name one of {', '.join(GPUS)} instead."], IMPOSSIBLE
        ) from None


def _read_integer(flag: str, text: str, problems: list[str]) -> int:
    try:
        return int(text)
    except ValueError:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        problems.append(f"{flag} is {shown!r}, but it takes a whole number; use one such as 8.")
        return 0


def read_number(flag: str, text: str, problems: list[str]) -> float:
    """A finite number; what is none becomes a problem and 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isfinite(value):
        return value
    shown = text if len(text) <= 40 else f"{text[:40]}..."
    problems.append(f"{flag} is {shown!r}, but it takes a number; use one such as 0.9.")
    return 0.0


def read_gib(
    flag: str, text: str | None, problems: list[str], *, signed: bool = False
) -> int | None:
    """GiB as bytes, None for None; a size that no GPU has becomes a problem."""
    if text is None:
        return None
    value = read_number(flag, text, problems)
    floor = -_MAX_GIB if signed else 0
    if not floor <= value <= _MAX_GIB:
        problems.append(
            f"{flag} is {text}, but it is GiB of one GPU, from {floor} to {_MAX_GIB}; give the "
            "figure that the server log shows."
        )
        return 0
    return round(value * GIB)


def _check_name(flag: str, name: str, known: tuple[str, ...], problems: list[str]) -> None:
    if name not in known:
        problems.append(f"{flag} is {name!r}, which is not known; use one of {', '.join(known)}.")
