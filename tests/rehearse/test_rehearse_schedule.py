import _thread
import functools
import os
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from rehearse_processes import assert_ended

from vllm_dcp_mla.rehearse import launch, mps, schedule
from vllm_dcp_mla.rehearse.engine import EngineSpec
from vllm_dcp_mla.rehearse.faults import FAULTS
from vllm_dcp_mla.rehearse.launch import Engine
from vllm_dcp_mla.rehearse.machine import LocalGpu, Machine, MachineError
from vllm_dcp_mla.rehearse.placement import Placement
from vllm_dcp_mla.rehearse.requests import Requests

STAND_IN = str(Path(__file__).with_name("rehearse_stand_in.py"))
REQUESTS = Requests(prompts=[[1]], wave=[0], forced=0, generated=1, scored=[0])
GIB = 1 << 30


def spec(name, world, dcp=None):
    sizes = {"tp": world, "dcp": dcp or world, "model": "/nowhere", "name": name}
    limits = {"max_model_len": 64, "max_num_batched_tokens": 64, "utilization": 0.5}
    return EngineSpec(**sizes, **limits, kv_cache_bytes=None)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs engines of stand-ins."""
    monkeypatch.setattr(launch, "_STACK_SECONDS", 0.3)
    monkeypatch.setattr(schedule, "_POLL_SECONDS", 0.02)

    def run_some(behaviour, *specs, placement=None, seconds=60, fault=None, progress=None):
        command = (sys.executable, "-S", STAND_IN, behaviour)
        monkeypatch.setattr(schedule, "Engine", functools.partial(Engine, command=command))
        return schedule.run(
            [(one, REQUESTS) for one in specs],
            tmp_path,
            placement=placement or Placement(4, 1, 1),
            engine_seconds=seconds,
            fault=fault,
            progress=progress or (lambda text: None),
        )

    yield run_some
    assert stand_ins(tmp_path) == [], "nothing is left running"


def stand_ins(folder):
    """Processes with the test's folder on their command line."""
    left = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = process.info["cmdline"] or []
        if any(str(folder) in word for word in line) and process.info["status"] != "zombie":
            left.append(process)
    return left


def test_every_engine_runs_once_and_gives_its_gpus_back(run):
    placement = Placement(2, 1, 1)
    specs = [spec("a", 1), spec("b", 2), spec("c", 2), spec("d", 1)]
    results = run("fine", *specs, placement=placement)
    assert set(results) == {"a", "b", "c", "d"}
    for one in specs:
        result = results[one.name]
        assert (result.failure, result.spec) == (None, one)
        assert [rank["rank"] for rank in result.ranks] == list(range(one.world))
        assert 0 < result.seconds < 60
    assert placement.take(2) == (0, 1), "all GPUs are free again"


def test_no_more_runs_at_a_time_than_there_is_room_for(run, monkeypatch):
    most, real = [], Placement.take

    def take(self, ranks):
        chosen = real(self, ranks)
        most.append(sum(self._load.values()))
        return chosen

    monkeypatch.setattr(Placement, "take", take)
    run("fine", *(spec(f"e{i}", 2) for i in range(4)), placement=Placement(1, 2, 4))
    assert max(most) == 4


def test_the_first_engine_compiles_alone(run):
    said = []
    run("hangs", spec("a", 1), spec("b", 1), progress=said.append, seconds=2)
    assert not any("a: " in text and "b: " in text for text in said)
    assert any("b: " in text for text in said)


def test_an_engine_that_fails_stops_no_other(run):
    results = run("raises", spec("alone", 1), spec("pair", 2), seconds=4)
    assert "the cache is on fire" in results["pair"].failure
    assert "not done after" in results["alone"].failure


def test_a_fault_is_planted_under_dcp_only(run):
    fault = FAULTS["kill-start"]
    results = run("hangs", spec("pair", 2), spec("plain", 2, 1), fault=fault, seconds=3)
    assert "rank 1 was ended by SIGKILL while it started" in results["pair"].failure
    assert "not done after" in results["plain"].failure


def test_progress_names_what_runs(run):
    said = []
    run("serves on", spec("a", 1), spec("b", 1), progress=said.append, seconds=3)
    assert any("a: " in text and "b: " in text for text in said)


def interrupt_once(folder, strike):
    """Strikes when both ranks of the engine have started."""

    def wait():
        until = time.monotonic() + 30
        while time.monotonic() < until:
            if sum(bool(path.read_text()) for path in folder.glob("pair/*.child")) == 2:
                break
            time.sleep(0.02)
        strike()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_an_interrupt_ends_everything(run, tmp_path):
    thread = interrupt_once(tmp_path, _thread.interrupt_main)
    with pytest.raises(KeyboardInterrupt):
        run("has children", spec("pair", 2))
    thread.join()
    children = [int(path.read_text()) for path in tmp_path.glob("pair/*.child")]
    assert len(children) == 2
    assert_ended(children)


def test_what_goes_wrong_while_watching_ends_everything(run, tmp_path):
    def progress(text):
        if stand_ins(tmp_path):
            raise OSError("the terminal is gone")

    with pytest.raises(OSError, match="the terminal is gone"):
        run("hangs", spec("pair", 2), progress=progress)


def test_a_command_that_cannot_start_ends_the_others(run, tmp_path, monkeypatch):
    real = Engine.start

    def start(self, *arguments):
        if self.spec.name == "second":
            raise OSError("no more processes")
        real(self, *arguments)

    monkeypatch.setattr(Engine, "start", start)
    with pytest.raises(OSError, match="no more processes"):
        run("serves on", spec("first", 2), spec("second", 2))


def test_shared_ranks_find_the_service_and_it_ends_with_them(run, tmp_path, monkeypatch):
    calls = []

    class Service:
        def __init__(self, folder):
            calls.append(folder)

        def start(self, gpus):
            return {"CUDA_MPS_PIPE_DIRECTORY": "/pipes"}

        def stop(self):
            calls.append("stopped")

    monkeypatch.setattr(mps, "MultiProcessService", Service)
    shared = spec("pair", 2).model_copy(update={"shared": True})
    alone = spec("one", 1).model_copy(update={"shared": True})
    whole = spec("whole", 2).model_copy(update={"shared": True, "whole_gpu": True})
    results = run("environment", shared, alone, whole, placement=Placement(1, 2, 3))
    pipes = {
        name: [rank["environment"].get("CUDA_MPS_PIPE_DIRECTORY") for rank in result.ranks]
        for name, result in results.items()
    }
    assert pipes["pair"] == ["/pipes"] * 2
    assert pipes["one"] == [None]
    nowhere, same = pipes["whole"]
    assert nowhere == same
    assert Path(nowhere).parent == tmp_path / "whole"
    assert not Path(nowhere).exists()
    assert calls == [tmp_path / "pair" / "mps", "stopped"]


def machine(*free):
    gpus = [
        LocalGpu(name="GPU", arch=(9, 0), total_bytes=200 * GIB, free_bytes=f * GIB) for f in free
    ]
    return Machine(gpus=tuple(gpus), nccl=(2, 30, 0), versions={})


@pytest.fixture
def service(monkeypatch):
    def there(yes, cores):
        monkeypatch.setattr(mps, "available", lambda: yes)
        monkeypatch.setattr(os, "cpu_count", lambda: cores)

    return there


def test_a_gpu_each_runs_one_engine_at_a_time(service):
    service(True, 64)
    assert schedule.place(machine(10, 10), 2, 1, packed=False, quiet=False) == Placement(2, 1, 1)


def test_ranks_that_take_turns_are_of_one_engine(service):
    service(False, 64)
    assert schedule.place(machine(140), 2, 4, packed=True, quiet=False) == Placement(1, 4, 2)


@pytest.mark.parametrize(
    ("free", "cores", "room"), [(140, 64, 11), (140, 16, 8), (140, 2, 2), (30, 64, 2)]
)
def test_with_a_service_memory_and_cores_bound_the_engines(service, free, cores, room):
    service(True, cores)
    assert schedule.place(machine(free), 2, 2, packed=False, quiet=False).capacity == room


def test_nothing_runs_beside_an_engine_that_watches_its_memory(service):
    """A GPU's free memory is everybody's; smaller engines than the largest watch it, too."""
    service(True, 64)
    placement = schedule.place(machine(140, 140), 4, 2, packed=False, quiet=True)
    assert placement.take(2) == (0, 1)
    assert placement.take(2) is placement.take(1) is None
    placement.give_back((0, 1), 2)
    assert placement.take(1) == (0,)
    assert placement.take(2) is None
    assert placement.take(1) == (1,)


def test_too_little_memory_is_said(service):
    service(True, 64)
    with pytest.raises(MachineError) as caught:
        schedule.place(machine(140, 20), 4, 2, packed=False, quiet=True)
    assert str(caught.value) == (
        "a GPU has 20.0 GiB free, and 2 ranks on it need 24; end what else uses it, or rehearse "
        "fewer ranks."
    )
