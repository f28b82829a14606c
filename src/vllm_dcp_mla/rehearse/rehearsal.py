"""A rehearsal from configurations to cases."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import schedule
from .checkpoint import RehearsalModel, write_checkpoint
from .configuration import Configuration, Limits, engine_of, with_baselines
from .faults import Fault
from .judge import Case, judge
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
        fault: planted into every engine under DCP, None for none.
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
        engines: classes and kernels that ran, by configuration.
        shared: whether ranks shared GPUs.
        seconds: altogether.
        folder: logs, where a case failed; None where they were removed.
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
    engines = list(configurations)
    if options.fault is None:
        engines = with_baselines(configurations)
    largest = max(engine.world for engine in engines)
    share = ranks_per_gpu(machine, largest, options.ranks_per_gpu)
    at_once = schedule.ranks_at_once(machine, largest, share)
    folder = Path(tempfile.mkdtemp(prefix="vllm-dcp-mla-rehearse-"))
    outcome: Outcome | None = None
    try:
        models = {}
        for name in dict.fromkeys(c.model for c in configurations):
            progress(f"writing a random {name}")
            checkpoint = folder / f"model{len(models)}"
            models[name] = write_checkpoint(name, checkpoint, index_topk=options.index_topk)
        asked = {
            name: prompts(model.index_topk, model.vocab_size, max(c.dcp for c in configurations))
            for name, model in models.items()
        }
        specs = [
            (
                engine_of(
                    engine,
                    models[engine.model].folder,
                    Limits(
                        max_model_len(models[engine.model].index_topk),
                        options.max_num_batched_tokens,
                    ),
                    shared=share > 1 or len(machine.gpus) < largest,
                ),
                Requests.of(asked[engine.model], models[engine.model].vocab_size),
            )
            for engine in engines
        ]
        results = schedule.run(
            specs,
            folder,
            ranks_per_gpu=share,
            at_once=at_once,
            engine_seconds=options.engine_seconds,
            fault=options.fault,
            progress=progress,
        )
        outcome = Outcome(
            _cases(configurations, results, asked, models, options),
            _classes(results),
            share > 1,
            time.monotonic() - started,
            folder,
        )
        return outcome
    finally:
        _clean(folder, keep_logs=outcome is None or not outcome.ok)
        if outcome is not None and outcome.ok:
            outcome = replace(outcome, folder=None)


def _cases(
    configurations: Sequence[Configuration],
    results: dict[str, schedule.EngineResult],
    asked: dict[str, list[Prompt]],
    models: dict[str, RehearsalModel],
    options: Options,
) -> list[Case]:
    cases: list[Case] = []
    for configuration in configurations:
        if options.fault is not None:
            cases.append(_faulty(configuration, results[configuration.name]))
            continue
        cases += judge(
            configuration, results, asked[configuration.model], models[configuration.model].heads
        )
    # Engines without DCP serve several configurations; what is wrong with one is said once.
    return list({case.name: case for case in cases}.values())
