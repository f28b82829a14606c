"""A rehearsal from configurations to cases."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from . import outside, recall, schedule, soak
from .against_plan import judge_memory
from .checkpoint import RehearsalModel, write_checkpoint
from .config import MAX_MODEL_LEN, Scores
from .configuration import Configuration, Limits, engine_of, with_baselines
from .engine import SHARED_KV_CACHE_BYTES, EngineSpec
from .judge import Case, conduct, judge, judge_outside
from .machine import Machine, MachineError, ranks_per_gpu
from .options import Options
from .recall import Recall
from .requests import Recording, Requests, Soak
from .soak_judge import judge_soak
from .workload import CACHE_BLOCK_TOKENS, PROMPTS_PER_CLASS, Prompt, max_model_len, prompts

#: Folder of the checkpoints, beside those of the engines, which have longer names.
_MODELS = "models"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it.

    Attributes:
        cases: all of them.
        engines: what each engine was and how long it took, by name.
        shared: whether ranks shared a GPU.
        seconds: altogether.
        folder: the logs, kept where a case failed.
        missing: why a model was not compared with HF.
        scores: how those of the models were distributed over keys.
    """

    cases: list[Case]
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    shared: bool = False
    seconds: float = 0.0
    folder: Path | None = None
    missing: list[str] = field(default_factory=list)
    scores: Scores = "normal"

    @property
    def ok(self) -> bool:
        """Whether every case is as promised."""
        return all(case.ok for case in self.cases)


def rehearse(
    configurations: Sequence[Configuration],
    machine: Machine,
    options: Options,
    progress: Callable[[str], None],
) -> Outcome:
    """Runs all engines that the configurations take, and judges them.

    Args:
        configurations: what is rehearsed.
        machine: this machine.
        options: how.
        progress: told what is going on, often.

    Raises:
        .machine.MachineError: this machine has too few GPUs, or too little memory or disk.
        ..models.ModelConfigError: a model that no checkpoint can be made of.
    """
    started = time.monotonic()
    engines = list(configurations) if options.fault else with_baselines(configurations)
    largest = max(engine.world for engine in engines)
    share = ranks_per_gpu(machine, largest, options.ranks_per_gpu)
    placement = schedule.place(
        machine,
        largest,
        share,
        packed=options.ranks_per_gpu is not None,
        quiet=options.soak_seconds is not None,
    )
    folder = _private_folder()
    keep = False
    try:
        models = _write_models(configurations, folder / _MODELS, options, progress)
        if share > 1:
            _refuse_more_than_a_shared_cache(configurations, models, options)
        # Prompts are the same for all engines of a model, and as awkward as its most ranks make it.
        ranks = max(configuration.dcp for configuration in configurations)
        arch = machine.gpus[0].arch
        asked = {name: _prompts(model, ranks, options) for name, model in models.items()}
        results = schedule.run(
            [
                _engine(engine, models[engine.model], asked[engine.model], options, share > 1, arch)
                for engine in engines
            ],
            folder,
            placement=placement,
            engine_seconds=options.engine_seconds + (options.soak_seconds or 0),
            fault=options.fault,
            progress=progress,
        )
        references: dict[str, np.ndarray] = {}
        missing: list[str] = []
        if options.fault is None and options.soak_seconds is None:
            references, missing = _references(configurations, models, asked, progress)
        recalls = _recalls(engines, results, asked, models, progress)
        cases = _cases(configurations, results, asked, models, references, recalls, options)
        keep = not all(case.ok for case in cases)
        return Outcome(
            cases,
            {name: _describe(result, recalls.get(name, {})) for name, result in results.items()},
            share > 1,
            time.monotonic() - started,
            folder if keep else None,
            missing,
            options.scores,
        )
    finally:
        # Logs are kept only where the outcome says where they are.
        shutil.rmtree(folder / _MODELS if keep else folder, ignore_errors=True)


def _private_folder() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="vllm-dcp-mla-rehearse-"))
    except OSError as error:
        raise MachineError(f"no folder for the rehearsal: {error}; set TMPDIR.") from None


def _write_models(
    configurations: Sequence[Configuration],
    folder: Path,
    options: Options,
    progress: Callable[[str], None],
) -> dict[str, RehearsalModel]:
    models: dict[str, RehearsalModel] = {}
    for name in dict.fromkeys(configuration.model for configuration in configurations):
        progress(f"writing a small random {name}")
        target = folder / str(len(models))
        try:
            models[name] = write_checkpoint(
                name,
                target,
                index_topk=options.index_topk,
                max_model_len=max(MAX_MODEL_LEN, max_model_len(0, options.long_tokens)),
                scores=options.scores,
            )
        except OSError as error:
            raise MachineError(
                f"the weights of {name} cannot be written to {target}: {error}; a model takes "
                "0.7 GB: make room, or set TMPDIR to a folder that has it."
            ) from None
    return models


def _refuse_more_than_a_shared_cache(
    configurations: Sequence[Configuration], models: dict[str, RehearsalModel], options: Options
) -> None:
    """Before engines start that vLLM would stop.

    Raises:
        MachineError: one rank alone, which each configuration is compared with, has no room for the
            longest request.
    """
    for one in configurations:
        model = models[one.model]
        token_bytes = model.cache_bytes_without_drafter(one.kv_cache_dtype)
        blocks = SHARED_KV_CACHE_BYTES // (CACHE_BLOCK_TOKENS * token_bytes)
        room = (blocks - 1) * CACHE_BLOCK_TOKENS  # vLLM keeps one for itself
        needed = max_model_len(model.index_topk, options.long_tokens)
        if needed > room:
            raise MachineError(
                f"--long-prompt {options.long_tokens} takes a KV cache of {needed:,} tokens on one "
                f"rank; where ranks share a GPU it has {SHARED_KV_CACHE_BYTES >> 30} GiB, which is "
                f"{room:,} tokens of {one.kv_cache_dtype}. Give a shorter one, or each rank a GPU "
                "(no --ranks-per-gpu, and as many GPUs)."
            )


def _references(
    configurations: Sequence[Configuration],
    models: dict[str, RehearsalModel],
    asked: dict[str, list[Prompt]],
    progress: Callable[[str], None],
) -> tuple[dict[str, np.ndarray], list[str]]:
    """HF's log-probabilities for each model with a bf16 cache; why there are none for others."""
    found, missing = {}, []
    for name in dict.fromkeys(c.model for c in configurations if c.kv_cache_dtype == "bfloat16"):
        progress(f"asking HF about {name}, in float32")
        try:
            found[name] = outside.first_scores(models[name], asked[name])
        except outside.NoReferenceError as error:
            missing.append(f"{name} was not compared with HF: {error}")
    return found, missing


def _prompts(model: RehearsalModel, ranks: int, options: Options) -> list[Prompt]:
    per_class = PROMPTS_PER_CLASS if options.soak_seconds is None else soak.PROMPTS_PER_CLASS
    return prompts(
        model.index_topk,
        model.vocab_size,
        ranks,
        per_class=per_class,
        long_tokens=options.long_tokens,
    )


def _engine(
    configuration: Configuration,
    model: RehearsalModel,
    asked: list[Prompt],
    options: Options,
    shared: bool,
    arch: tuple[int, int],
) -> tuple[EngineSpec, Requests]:
    """An engine and what it serves."""
    limits = Limits(
        max_model_len(model.index_topk, options.long_tokens), options.max_num_batched_tokens
    )
    cache_bytes = SHARED_KV_CACHE_BYTES if shared else None
    spec = engine_of(configuration, model.folder, limits, cache_bytes, arch)
    if options.soak_seconds is None:
        requests = Requests.of(asked, model.vocab_size)
        if options.fault is None:
            recording = Recording.of(asked, model.index_topk)
            requests = requests.model_copy(update={"recording": recording})
        return spec, requests
    requests = Requests.of(asked, model.vocab_size, soak.GENERATED_TOKENS)
    if configuration.dcp == 1:
        return spec, requests
    crowded = spec.model_copy(
        update={
            "kv_cache_bytes": soak.LONGEST_REQUESTS
            * limits.max_model_len
            * model.cache_bytes(configuration.kv_cache_dtype)
            // configuration.dcp
        }
    )
    return crowded, requests.model_copy(update={"soak": Soak(seconds=options.soak_seconds)})


def _cases(
    configurations: Sequence[Configuration],
    results: dict[str, schedule.EngineResult],
    asked: dict[str, list[Prompt]],
    models: dict[str, RehearsalModel],
    references: dict[str, np.ndarray],
    recalls: dict[str, dict[str, Recall]],
    options: Options,
) -> list[Case]:
    cases: list[Case] = []
    for configuration in configurations:
        model = configuration.model
        if options.fault is not None:
            cases.append(conduct(configuration, results[configuration.name]))
        elif options.soak_seconds is not None:
            cases += judge_soak(configuration, results)
            cases += judge_memory(configuration, results[configuration.name])
        else:
            cases += judge(
                configuration,
                results,
                asked[model],
                recalls.get(configuration.name),
            )
            cases += judge_memory(configuration, results[configuration.name])
            if model in references and configuration.kv_cache_dtype == "bfloat16":
                numbers = outside.chosen(asked[model])
                cases += judge_outside(configuration, results, numbers, references[model])
    # A baseline serves several configurations; what is wrong with it is said once.
    return list({case.name: case for case in cases}.values())


def _recalls(
    engines: Sequence[Configuration],
    results: dict[str, schedule.EngineResult],
    asked: dict[str, list[Prompt]],
    models: dict[str, RehearsalModel],
    progress: Callable[[str], None],
) -> dict[str, dict[str, Recall]]:
    """What each engine's indexers selected, by length class."""
    found: dict[str, dict[str, Recall]] = {}
    for name, model in models.items():
        progress(f"comparing what the indexers of {name} selected")
        own = {one.name: one.baseline(1).name for one in engines if one.model == name}
        found |= recall.of_engines(results, own, asked[name], model)
    return found


def _describe(result: schedule.EngineResult, recalls: dict[str, Recall]) -> dict[str, Any]:
    if not result.ranks:
        return {"ran": None, "seconds": round(result.seconds, 1)}
    first = result.ranks[0]
    engine = first["engine"]
    return {
        "ran": f"{', '.join(engine['impls'])} ({', '.join(engine['kernels']) or 'stock kernel'})",
        "seconds": round(result.seconds, 1),
        "ready_seconds": round(first["ready_seconds"], 1),
        "serve_seconds": round(first["serve_seconds"], 1),
        "model_bytes": engine["model_bytes"],
        "kv_tokens": engine["kv_blocks"] * engine["kv_block_tokens"],
        # Whoever they belong to: stock's are its own business, but they are named.
        "late_compiles": sorted({f"{owner}: {what}" for owner, what in first["late_compiles"]}),
        "syncs": sorted({f"{owner}: {what}" for owner, what in first["syncs"]}),
        "metrics": first["metrics"],
        "recall": {name: one.as_json() for name, one in recalls.items()},
    }
