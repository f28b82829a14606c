"""What a user asked for on the command line: read, checked, every problem one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..capability import TABLE, Deployment, Libraries, ModelDims
from ..models import ModelConfigError, UnservedModelError, load_config
from ..simulate.gpus import GPUS, Gpu
from ..topology import check_topology
from . import local_gpu
from .defaults import resolve_comm, resolve_kv_cache_dtype

LOCAL = "local"
COMMS = ("ag_rs", "a2a")
KV_CACHE_DTYPES = tuple(sorted({name for row in TABLE for name in row.formats}))
#: Ranks that hold one copy of a model; the search for a working neighbour grows with them.
MAX_RANKS = 1024
#: vLLM counts the tokens of a step in int32.
MAX_TOKENS = (1 << 31) - 1

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
    """The flags as typed; ``comm`` is None where it was left out."""

    model: str
    gpu: str
    tp: str
    pcp: str
    dcp: str
    kv_cache_dtype: str
    max_num_batched_tokens: str
    comm: str | None


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

    def deployment(self, gpu: Gpu, libraries: Libraries, *, kernel: str) -> Deployment:
        """The request in the capability table's terms; its sizes must be possible.

        Args:
            gpu: the GPU it runs on.
            libraries: what is installed there.
            kernel: the setting ``kernel``.
        """
        return Deployment(
            arch=gpu.arch,
            kv_cache_dtype=resolve_kv_cache_dtype(self.config, self.kv_cache_dtype, gpu.arch),
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
        )
    }
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


def _check_name(flag: str, name: str, known: tuple[str, ...], problems: list[str]) -> None:
    if name not in known:
        problems.append(f"{flag} is {name!r}, which is not known; use one of {', '.join(known)}.")
