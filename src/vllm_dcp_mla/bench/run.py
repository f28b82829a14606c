"""One run: what is missing for it, the machine, the works one after the other, the outcome."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..compat.installed import installed_version, package_folder
from ..compat.releases import RELEASES, installed_release
from .floor import Ceilings
from .rows import Row
from .works import GPU, NEWEST, SM90, WORKS, Work

_WITHOUT = ("collectives between GPUs", "a served model's throughput", "power and clocks")


class BenchError(RuntimeError):
    """This machine cannot run what was asked for; the messages say what is missing."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(" ".join(problems))
        self.problems = problems


@dataclass(slots=True)
class Outcome:
    """All that came of a run.

    Attributes:
        machine: its parts and ceilings.
        works: names of those that ran.
        rows: what they measured.
        problems: providers that are wrong and works that failed, one sentence each.
        remarks: what works said beside their rows.
        fits, estimates: lines and what was estimated from them.
        seconds: of all of it.
    """

    machine: dict[str, Any]
    works: list[Work]
    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    fits: list[dict[str, Any]] = field(default_factory=list)
    estimates: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every provider was right and every work ended."""
        return not self.problems

    @property
    def not_measured(self) -> list[str]:
        """What the figures say nothing about."""
        said = [sentence for work in self.works for sentence in work.silent_about]
        left = [work.name for work in WORKS.values() if work not in self.works]
        if left:
            said.append(f"Works that did not run: {', '.join(left)}.")
        return [*said, f"Not measured by any work: {', '.join(_WITHOUT)}."]


def missing(works: list[Work]) -> list[str]:
    """What these works need and this machine lacks, one sentence each; empty when they can run.

    torch is imported only where vLLM is installed.
    """
    if package_folder("vllm") is None:
        return ["vLLM is not installed; run pip install 'vllm-dcp-mla[vllm]'."]
    lacking = []
    if installed_release() is not RELEASES[-1]:
        lacking.append(NEWEST)
    import torch

    if not torch.cuda.is_available():
        lacking += [GPU, SM90]
    elif torch.cuda.get_device_capability()[0] != 9:
        lacking.append(SM90)
    here = {NEWEST: f"vLLM {installed_version('vllm')} is installed"}
    problems = []
    for need in lacking:
        names = [work.name for work in works if need in work.needs]
        if names:
            found = here.get(need, _gpu_found())
            problems.append(f"{', '.join(names)}: needs {need}, {found}.")
    if problems:
        able = [w.name for w in WORKS.values() if not set(w.needs) & set(lacking)]
        problems.append(
            f"What can run here: --work {','.join(able)}." if able else "No work can run here."
        )
    return problems


def _gpu_found() -> str:
    import torch

    if not torch.cuda.is_available():
        return "torch sees no GPU on this machine; see nvidia-smi and CUDA_VISIBLE_DEVICES"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} has capability {major}.{minor}"


def run_bench(works: list[Work], *, quick: bool, note: Callable[[str], None]) -> Outcome:
    """Runs works; a work that fails is a problem, and the others go on.

    Args:
        works: in order.
        quick: whether to leave sizes out.
        note: told what happens, row by row.

    Raises:
        BenchError: this machine lacks what a work needs.
    """
    started = time.perf_counter()
    if problems := missing(works):
        raise BenchError(problems)
    import torch

    from . import engine

    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    note("importing vLLM")
    engine.prepare(device_type)
    from . import machine
    from .workbench import Workbench

    device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
    said = machine.describe(device)
    ceilings = None
    if device_type == "cuda":
        note("measuring bandwidth and peak")
        ceilings = _ceilings(device)
        said["bandwidth_tb_s"] = round(ceilings.bytes_per_us / 1e6, 3)
        said["bf16_tflop_s"] = round(ceilings.flops_per_us / 1e6, 1)
    workbench = Workbench(
        device, quick, ceilings, said.get("multiprocessors", 4), said.get("l2_bytes", 1)
    )
    outcome = Outcome(said, works)
    torch.manual_seed(0)
    with torch.inference_mode():
        for work in works:
            _run_work(work, workbench, outcome, note)
    outcome.remarks, outcome.fits = workbench.remarks, workbench.fits
    outcome.estimates = workbench.estimates
    outcome.seconds = time.perf_counter() - started
    return outcome


def _ceilings(device: Any) -> Ceilings:
    import torch

    from . import machine

    try:
        return machine.measure_ceilings(device)
    except torch.OutOfMemoryError as error:
        text = str(error).partition("\n")[0]
        raise BenchError(
            [f"bandwidth is measured in 4 GiB of the GPU: {text} End what else uses it."]
        ) from None


def _run_work(work: Work, workbench: Any, outcome: Outcome, note: Callable[[str], None]) -> None:
    try:
        for row in work.runner()(workbench):
            outcome.rows.append(row)
            note(_one_line(row))
            if row.problem is not None:
                where = f"{row.work}, {row.shape}, {row.provider}"
                outcome.problems.append(f"{where} is wrong: {row.problem}.")
    except Exception as error:  # noqa: BLE001  (a failed work is said, and costs no other's rows)
        note(traceback.format_exc())
        outcome.problems.append(f"{work.name} did not end: {type(error).__name__}: {error}")


def _one_line(row: Row) -> str:
    figures = "" if row.us is None else f"{row.us:.1f} us (spread {row.spread or 0:.1%})"
    floor = "" if row.floor_us is None else f", floor {row.floor_us:.1f}"
    counted = ", ".join(f"{name} {value:,.0f}" for name, value in row.counted.items())
    said = ", ".join(filter(None, (figures + floor, counted, row.problem, row.note)))
    return f"{row.work}: {row.shape}, {row.provider}: {said}"
