"""What is rehearsed: one configuration, or a pairwise cover of many, and the engines it takes."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..models import BUILT_IN
from ..plugin import ALIAS
from ..settings import KernelChoice
from .engine import SHARED_UTILIZATION, EngineSpec, Graphs

#: Utilisation of an engine that has its GPUs for itself.
_UTILIZATION = 0.8
#: Of FLASHINFER_MLA_SPARSE_SM90; vLLM takes another class for bf16 first.
_FLASHINFER_SM90_CACHES = ("fp8", "fp8_e4m3")
#: Characters of a folder's name that an engine's name keeps.
_MODEL_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class Configuration:
    """One thing to rehearse, in the command line's terms.

    Attributes:
        model: built-in name or config folder.
        tp, pcp, dcp: parallel sizes.
        kv_cache_dtype: vLLM's ``--kv-cache-dtype``.
        comm: ``--dcp-comm-backend``.
        mtp: speculative tokens.
        graphs: CUDA graphs.
        kernel: the package's setting; ``reference`` runs the SM100 classes on any GPU.
        force_mqa: keep short prompts off the dense prefill path, which reads no cache.
        ours: whether a class of this package is to serve it; not part of the engine.
    """

    model: str
    tp: int
    pcp: int
    dcp: int
    kv_cache_dtype: str
    comm: str
    mtp: int
    graphs: Graphs
    kernel: KernelChoice
    force_mqa: bool = True
    ours: bool = False

    @property
    def world(self) -> int:
        """Ranks."""
        return self.tp * self.pcp

    @property
    def name(self) -> str:
        """Of the engine and its cases; a file name too.

        Configurations that run different engines differ in it, but for ``kernel``, which all have
        in common.
        """
        sizes = "-".join(
            f"{label}{size}"
            for label, size in (("tp", self.tp), ("pcp", self.pcp), ("dcp", self.dcp))
            if size > 1 or label == "tp"
        )
        parts = [_model_name(self.model), sizes, self.kv_cache_dtype]
        if self.dcp > 1:
            parts.append(self.comm)
        if self.graphs != "none":
            parts.append(self.graphs)
        if self.mtp:
            parts.append(f"mtp{self.mtp}")
        if not self.force_mqa:
            parts.append("dense-prefill")
        return "_".join(parts)

    def baseline(self, tp: int) -> Configuration:
        """The same model and cache with ``tp`` ranks and nothing else."""
        return replace(self, tp=tp, pcp=1, dcp=1, comm="ag_rs", mtp=0, graphs="none")

    def with_dense_prefill(self) -> Configuration:
        """The same as vLLM serves it: short prompts attend without the cache."""
        return replace(self, force_mqa=False)


@dataclass(frozen=True, slots=True)
class Limits:
    """vLLM's limits in tokens, the same for every engine."""

    max_model_len: int
    max_num_batched_tokens: int


def _model_name(model: str) -> str:
    """A built-in name, or a folder's with what sets it apart from others of that name."""
    if model in BUILT_IN:
        return model
    folder = Path(model).resolve()
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:6]
    plain = re.sub("[^A-Za-z0-9.-]+", "-", folder.name)[:_MODEL_CHARACTERS]
    return f"{plain}-{digest}"


def engine_of(
    configuration: Configuration,
    checkpoint: Path,
    limits: Limits,
    kv_cache_bytes: int | None,
    arch: tuple[int, int],
) -> EngineSpec:
    """The engine that runs a configuration.

    Args:
        configuration: what runs.
        checkpoint: its random weights.
        limits: of every engine.
        kv_cache_bytes: of a rank where ranks share a GPU; None where they do not.
        arch: compute capability of the GPUs.
    """
    return EngineSpec(
        name=configuration.name,
        model=str(checkpoint),
        tp=configuration.tp,
        pcp=configuration.pcp,
        dcp=configuration.dcp,
        kv_cache_dtype=configuration.kv_cache_dtype,
        comm=configuration.comm,
        mtp=configuration.mtp,
        graphs=configuration.graphs,
        # Without DCP, too, so that the baselines run the same class.
        backend=ALIAS if configuration.kernel == "reference" else None,
        kernel=configuration.kernel,
        force_mqa=configuration.force_mqa,
        strict=configuration.dcp > 1,
        max_model_len=limits.max_model_len,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        shared=kv_cache_bytes is not None,
        whole_gpu=_runs_flashinfer_sm90(configuration, arch),
        kv_cache_bytes=kv_cache_bytes,
        utilization=_UTILIZATION if kv_cache_bytes is None else SHARED_UTILIZATION,
    )


def _runs_flashinfer_sm90(configuration: Configuration, arch: tuple[int, int]) -> bool:
    """Whether stock's class for such caches on Hopper may serve, whose kernel's launch is a
    cooperative one: FlashInfer's ``mla_hopper.cuh``.
    """
    return (
        arch[0] == 9
        and configuration.dcp == 1
        and configuration.kernel != "reference"
        and configuration.kv_cache_dtype in _FLASHINFER_SM90_CACHES
    )


def with_baselines(configurations: Sequence[Configuration]) -> list[Configuration]:
    """All engines to run, the TP1 and TP2 ones that several share only once, and first."""
    engines: dict[str, Configuration] = {}
    for one in (*(c.baseline(tp) for c in configurations for tp in (1, 2)), *configurations):
        engines.setdefault(one.name, one)
    return list(engines.values())


#: The cover that one GPU can run: every pair of values occurs in some engine.
COVER: Mapping[str, tuple[Any, ...]] = {
    "sizes": ((2, 2), (4, 2)),
    "kv_cache_dtype": ("bfloat16", "fp8_e4m3"),
    "model": ("glm-5.2", "deepseek-v3.2"),
    "graphs": ("none", "piecewise", "full"),
    "mtp": (0, 1),
    "comm": ("ag_rs", "a2a"),
}


def cover(kernel: KernelChoice) -> list[Configuration]:
    """Configurations of :data:`COVER` in which every pair of values meets.

    Args:
        kernel: of all of them.
    """
    return [
        Configuration(
            model=row["model"],
            tp=row["sizes"][0],
            pcp=1,
            dcp=row["sizes"][1],
            kv_cache_dtype=row["kv_cache_dtype"],
            comm=row["comm"],
            mtp=row["mtp"],
            graphs=row["graphs"],
            kernel=kernel,
        )
        for row in pairwise(COVER)
    ]


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows that hold every pair of values of two factors: greedy, the same each time.

    Args:
        factors: name: values.
    """
    names = list(factors)
    rows = [
        dict(zip(names, values, strict=True)) for values in itertools.product(*factors.values())
    ]
    open_pairs = {pair for row in rows for pair in _pairs(row)}
    chosen = []
    while open_pairs:
        best = max(rows, key=lambda row: len(open_pairs & _pairs(row)))
        open_pairs -= _pairs(best)
        chosen.append(best)
    return chosen


def _pairs(row: Mapping[str, Any]) -> set[tuple[tuple[str, Any], ...]]:
    return set(itertools.combinations(row.items(), 2))
