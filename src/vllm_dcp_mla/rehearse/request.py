"""What a user asked to rehearse: read, checked, and turned into configurations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from ..capability import FLASHINFER, TABLE, explain, row, serving
from ..compat.libraries import libraries_here
from ..models import ModelConfigError, load_config
from ..planner.request import (
    IMPOSSIBLE,
    UNREADABLE,
    RawRequest,
    Request,
    RequestError,
    read_request,
)
from ..settings import KernelChoice
from ..simulate.gpus import Gpu
from .config import INDEX_TOPK, MAX_MODEL_LEN, SCORES, Scores, small_config
from .configuration import COVER, Configuration, cover
from .engine import GRAPHS, Graphs
from .faults import FAULTS
from .machine import LocalGpu, Machine
from .options import Options
from .workload import max_model_len

#: Drafted tokens of the one MTP layer that these models have; vLLM applies it again and again.
_MOST_MTP = 8
_AUTO = "auto"


@dataclass(frozen=True, slots=True)
class RawRehearsal:
    """The flags as typed, beside those of :class:`..planner.request.RawRequest`."""

    mtp: str
    graphs: str
    index_topk: str
    scores: str
    ranks_per_gpu: str
    time_limit: str
    long_prompt: str
    fault: str
    soak: str
    cover: bool


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The flags as understood; sizes are possible, but for this machine's.

    Attributes:
        request: model, sizes, cache, exchange.
        mtp: speculative tokens.
        graphs: CUDA graphs.
        cover: rehearse the pairwise cover instead of the request.
        options: how to run.
    """

    request: Request
    mtp: int
    graphs: Graphs
    cover: bool
    options: Options

    def configurations(self, machine: Machine, kernel: KernelChoice) -> list[Configuration]:
        """What to rehearse on a machine: with short prompts in sparse attention, and as vLLM would.

        Args:
            machine: this machine.
            kernel: the package's setting.

        Raises:
            RequestError: no backend serves the request on this GPU; says what works instead.
        """
        gpu = machine.gpus[0]
        if self.cover:
            return [
                _served(self._request_of(one), one.mtp, one.graphs, gpu, kernel)
                for one in cover(kernel)
            ]
        sparse = _served(self.request, self.mtp, self.graphs, gpu, kernel)
        if self.options.soak_seconds is not None or self.options.fault is not None:
            return [sparse]
        return [sparse, sparse.with_dense_prefill()]

    def _request_of(self, one: Configuration) -> Request:
        """The request whose model, sizes, cache and exchange are those of a configuration."""
        return replace(
            self.request,
            model=one.model,
            config=load_config(one.model),
            tp=one.tp,
            pcp=one.pcp,
            dcp=one.dcp,
            kv_cache_dtype=one.kv_cache_dtype,
            comm=one.comm,
        )


def _served(
    request: Request, mtp: int, graphs: Graphs, gpu: LocalGpu, kernel: KernelChoice
) -> Configuration:
    """What a request is on a GPU, with vLLM's defaults for what it leaves out.

    Raises:
        RequestError: no backend serves it.
    """
    local = Gpu(_slug(gpu.name), gpu.arch, 1, gpu.total_bytes)
    deployment = request.deployment(local, libraries_here(), kernel=kernel)
    cache, ours = deployment.kv_cache_dtype, False
    if deployment.dcp > 1:
        backend = serving(deployment)
        if backend is None:
            problem = (
                f"Nothing serves this on {gpu.name}: {explain(_closest(gpu.arch), deployment)}. "
                "VLLM_DCP_MLA_KERNEL=reference rehearses the SM100 classes on any GPU."
            )
            raise RequestError([problem], IMPOSSIBLE)
        served_by = row(backend)
        ours = served_by.ours
        if cache == "fp8":  # without DCP another backend serves, which may read it otherwise
            cache = served_by.formats[cache]
    return Configuration(
        model=request.model,
        tp=deployment.tp,
        pcp=deployment.pcp,
        dcp=deployment.dcp,
        kv_cache_dtype=cache,
        comm=deployment.comm,
        mtp=mtp,
        graphs=graphs,
        kernel=kernel,
        ours=ours,
    )


def _closest(arch: tuple[int, int]) -> str:
    """The backend whose reasons are said where none serves: the first of the GPU's."""
    return next((r.name for r in TABLE if arch[0] in r.arch_majors), FLASHINFER)


def read_rehearsal(raw: RawRequest, more: RawRehearsal) -> Rehearsal:
    """Reads the flags.

    Raises:
        RequestError: a flag that cannot be parsed, names nothing known or is out of range, or a
            model or topology that cannot be.
    """
    problems: list[str] = []
    mtp = _integer("--mtp", more.mtp, 0, _MOST_MTP, problems)
    seconds = _integer("--time-limit", more.time_limit, 10, 86_400, problems)
    long_tokens = _integer("--long-prompt", more.long_prompt, 0, 1 << 20, problems)
    minutes = _integer("--soak", more.soak, 0, 1440, problems)
    share = None
    if more.ranks_per_gpu != _AUTO:
        share = _integer("--ranks-per-gpu", more.ranks_per_gpu, 1, 64, problems, f"{_AUTO} or ")
    for flag, name, known in (
        ("--graphs", more.graphs, GRAPHS),
        ("--index-topk", more.index_topk, ("", *map(str, INDEX_TOPK))),
        ("--scores", more.scores, SCORES),
        ("--break", more.fault, ("", *FAULTS)),
    ):
        if name not in known:
            allowed = ", ".join(filter(None, known))
            problems.append(f"{flag} is {name!r}, which is not known; use one of {allowed}.")
    try:
        request = read_request(raw)
    except RequestError as error:
        code = UNREADABLE if problems else error.exit_code
        raise RequestError(problems + error.problems, code) from None
    if problems:
        raise RequestError(problems, UNREADABLE)
    impossible = request.problems()
    if request.tp * request.pcp == 1 and not impossible:
        impossible = ["--tp and --pcp are 1: one rank is what a rehearsal compares with; use 2."]
    # Each takes the place of what the others do.
    instead = {"--cover": more.cover, "--soak": minutes, "--break": more.fault}
    if len(given := [flag for flag, value in instead.items() if value]) > 1:
        impossible.append(f"{' and '.join(given)} are given together; leave all but one out.")
    if long_tokens and (minutes or more.fault):
        impossible.append(
            "--long-prompt is served once, and not by --soak or --break; leave it out."
        )
    index_topk = int(more.index_topk) if more.index_topk else None
    for model in COVER["model"] if more.cover else (request.model,):
        impossible += _model_problems(model, index_topk, long_tokens)
    if impossible:
        raise RequestError(impossible, IMPOSSIBLE)
    return Rehearsal(
        request,
        mtp,
        cast(Graphs, more.graphs),
        more.cover,
        Options(
            index_topk=index_topk,
            max_num_batched_tokens=request.max_num_batched_tokens,
            ranks_per_gpu=share,
            engine_seconds=seconds,
            fault=FAULTS[more.fault] if more.fault else None,
            scores=cast(Scores, more.scores),
            long_tokens=long_tokens,
            soak_seconds=60 * minutes or None,
        ),
    )


def _model_problems(model: str, index_topk: int | None, long_tokens: int) -> list[str]:
    """Why no small model can be made that serves all prompts; known before the machine is."""
    needed = max_model_len(0, long_tokens)
    try:
        config = small_config(
            model, index_topk=index_topk, max_model_len=max(MAX_MODEL_LEN, needed)
        )
    except ModelConfigError as error:
        return [str(error)]
    if needed <= (most := config["max_position_embeddings"]):
        return []
    problem = (
        f"--long-prompt {long_tokens} needs a context of {needed} tokens, and {model} has {most}; "
        "give a shorter one."
    )
    return [problem]


def _integer(
    flag: str, text: str, least: int, most: int, problems: list[str], other: str = ""
) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        problems.append(
            f"{flag} is {text[:40]!r}; it must be {other}a whole number from {least} to {most}."
        )
    return number


def _slug(name: str) -> str:
    return name.lower().replace(" ", "-")
