"""A rehearsal from configurations to cases."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import schedule
from .checkpoint import RehearsalModel, write_checkpoint
from .configuration import Configuration, Limits, engine_of, with_baselines
from .faults import Fault
from .judge import Case, conduct, judge
from .machine import Machine, ranks_per_gpu
from .requests import Requests
from .workload import Prompt, max_model_len, prompts


@dataclass(frozen=True, slots=True)
class Options:
    """How a rehearsal is run.

    Attributes:
        index_topk: of the small models, None for the released ones'.
        max_num_batched_tokens: most tokens of a step.
        ranks_per_gpu: None for the smallest number that works.
        engine_seconds: after which an engine is given up.
        fault: planted into every engine under DCP, which then runs alone; None for none.
    """

    index_topk: int | None
    max_num_batched_tokens: int
    ranks_per_gpu: int | None
    engine_seconds: float
    fault: Fault | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it.

    Attributes:
        cases: all of them.
        engines: classes and kernels that ran, by engine.
        shared: whether ranks shared a GPU.
        seconds: altogether.
        folder: the logs, kept where a case failed.
    """

    cases: list[Case]
    engines: dict[str, str] = field(default_factory=dict)
    shared: bool = False
    seconds: float = 0.0
    folder: Path | None = None

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
        .machine.MachineError: this machine has too few GPUs or too little memory.
        ..models.ModelConfigError: a model that no checkpoint can be made of.
    """
    started = time.monotonic()
    engines = list(configurations) if options.fault else with_baselines(configurations)
    largest = max(engine.world for engine in engines)
    share = ranks_per_gpu(machine, largest, options.ranks_per_gpu)
    at_once = schedule.ranks_at_once(machine, largest, share)
    folder = Path(tempfile.mkdtemp(prefix="vllm-dcp-mla-rehearse-"))
    keep = True
    try:
        models = _write_models(configurations, folder, options.index_topk, progress)
        ranks = max(configuration.dcp for configuration in configurations)
        asked = {
            name: prompts(model.index_topk, model.vocab_size, ranks)
            for name, model in models.items()
        }
        results = schedule.run(
            [
                (
                    engine_of(
                        engine,
                        models[engine.model].folder,
                        Limits(
                            max_model_len(models[engine.model].index_topk),
                            options.max_num_batched_tokens,
                        ),
                        shared=share > 1,
                    ),
                    Requests.of(asked[engine.model], models[engine.model].vocab_size),
                )
                for engine in engines
            ],
            folder,
            ranks_per_gpu=share,
            at_once=at_once,
            engine_seconds=options.engine_seconds,
            fault=options.fault,
            progress=progress,
        )
        cases = _cases(configurations, results, asked, models, options.fault is not None)
        keep = not all(case.ok for case in cases)
        return Outcome(
            cases,
            {name: _class_of(result) for name, result in results.items()},
            share > 1,
            time.monotonic() - started,
            folder if keep else None,
        )
    finally:
        for checkpoint in folder.glob("model*"):
            shutil.rmtree(checkpoint)
        if not keep:
            shutil.rmtree(folder)


def _write_models(
    configurations: Sequence[Configuration],
    folder: Path,
    index_topk: int | None,
    progress: Callable[[str], None],
) -> dict[str, RehearsalModel]:
    models: dict[str, RehearsalModel] = {}
    for name in dict.fromkeys(configuration.model for configuration in configurations):
        progress(f"writing a small random {name}")
        models[name] = write_checkpoint(name, folder / f"model{len(models)}", index_topk=index_topk)
    return models


def _cases(
    configurations: Sequence[Configuration],
    results: dict[str, schedule.EngineResult],
    asked: dict[str, list[Prompt]],
    models: dict[str, RehearsalModel],
    alone: bool,
) -> list[Case]:
    cases: list[Case] = []
    for configuration in configurations:
        if alone:
            cases.append(conduct(configuration, results[configuration.name]))
            continue
        model = configuration.model
        cases += judge(configuration, results, asked[model], models[model].heads)
    # A baseline serves several configurations; what is wrong with it is said once.
    return list({case.name: case for case in cases}.values())


def _class_of(result: schedule.EngineResult) -> str:
    if not result.ranks:
        return "did not run"
    engine = result.ranks[0]["engine"]
    return f"{', '.join(engine['impls'])} ({', '.join(engine['kernels']) or 'stock kernel'})"
