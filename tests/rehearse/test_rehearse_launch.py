import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rehearse_processes import assert_ended, runs

from vllm_dcp_mla.rehearse import launch
from vllm_dcp_mla.rehearse.engine import EngineSpec, environment
from vllm_dcp_mla.rehearse.faults import FAULTS
from vllm_dcp_mla.rehearse.launch import Engine, EngineError, error_of
from vllm_dcp_mla.rehearse.machine import MachineError
from vllm_dcp_mla.rehearse.rank import RankFiles
from vllm_dcp_mla.rehearse.requests import Requests

STAND_IN = str(Path(__file__).with_name("rehearse_stand_in.py"))
REQUESTS = Requests(prompts=[[1]], wave=[0], forced=0, generated=1, scored=[0])


def spec(world=2, **more):
    sizes = {"tp": world, "dcp": world, "model": "/nowhere", "name": "engine"}
    limits = {"max_model_len": 64, "max_num_batched_tokens": 64, "utilization": 0.5}
    return EngineSpec(**{**sizes, **limits, "kv_cache_bytes": None, **more})


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(launch, "_EXIT_SECONDS", 0.5)
    monkeypatch.setattr(launch, "_STACK_SECONDS", 0.5)


@pytest.fixture
def start(tmp_path):
    """Starts an engine of stand-ins; all are ended with the test."""
    engines = []

    def start_one(behaviour, world=2, fault=None, seconds=60, gpus=(0, 1), share=1, **more):
        engine = Engine(
            spec(world, **more),
            tmp_path / f"engine{len(engines)}",
            time.monotonic() + seconds,
            fault,
            (sys.executable, "-S", STAND_IN, behaviour),
        )
        engines.append(engine)
        engine.start(REQUESTS, gpus, share)
        return engine

    yield start_one
    for engine in engines:
        engine.end()


def results_of(engine, seconds=60):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if (results := engine.poll()) is not None:
            return results
        time.sleep(0.05)
    raise TimeoutError(engine.progress())


def failure_of(engine):
    with pytest.raises(EngineError) as caught:
        results_of(engine)
    assert_nothing_runs(engine)
    return str(caught.value)


def assert_nothing_runs(engine):
    for process in engine.processes:
        assert process.returncode is not None
    assert_ended([process.pid for process in engine.processes])


def wait_for(path, seconds=30):
    until = time.monotonic() + seconds
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < until, f"{path} was not written"
        time.sleep(0.02)
    return path.read_text()


def test_every_rank_answers_and_none_is_left(start):
    engine = start("fine", world=4, gpus=(0, 1), share=2)
    results = results_of(engine)
    assert [(r["rank"], r["local"]) for r in results] == [(0, "0"), (1, "0"), (2, "1"), (3, "1")]
    assert results[0]["argv"] == [str(os.getpid())], "a rank is told whom to end with"
    assert_nothing_runs(engine)


def test_the_folder_is_private_and_says_what_runs(start):
    engine = start("fine")
    assert stat.S_IMODE(engine.folder.stat().st_mode) == 0o700
    results_of(engine)
    written = (engine.folder / "engine.json").read_text()
    assert EngineSpec.model_validate_json(written) == engine.spec
    asked = (engine.folder / "requests.json").read_text()
    assert Requests.model_validate_json(asked) == REQUESTS


def test_ranks_get_their_environment_and_gpus(start, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    monkeypatch.setenv("OF_THE_CALLER", "kept")
    results = results_of(start("environment", gpus=(0, 2)))
    for rank, seen in enumerate(r["environment"] for r in results):
        assert seen["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-c"
        assert seen["OF_THE_CALLER"] == "kept"
        assert (seen["RANK"], seen["WORLD_SIZE"]) == (str(rank), "2")
        assert seen["MASTER_ADDR"] == "127.0.0.1"
    assert len({r["environment"]["MASTER_PORT"] for r in results}) == 1


def test_a_rank_that_raises(start):
    engine = start("raises")
    said = failure_of(engine)
    log = engine.folder / "rank1.log"
    assert said == (
        "engine: rank 1 ended with status 1 while it served. Rank 1 says: RuntimeError: the cache "
        f"is on fire. Logs: {log}."
    )
    assert log.exists()


def test_a_rank_that_is_killed(start):
    engine = start("killed")
    said = failure_of(engine)
    assert "rank 1 was ended by SIGTERM while it started." in said
    assert str(engine.folder / "rank1.log") in said


def test_a_rank_that_answers_nothing(start):
    assert "rank 1 ended without a result while it started." in failure_of(start("silent"))


def test_all_ranks_that_died_are_named(start):
    """The one that lost its peer may die before the one that is to blame."""
    engine = start("serves on", world=3, gpus=(0, 1, 2))
    for rank in range(3):
        wait_for(engine.folder / f"rank{rank}.events")
    (engine.folder / "rank0.log").write_text("[rank0]: RuntimeError: peer gone\n")
    (engine.folder / "rank2.log").write_text("RuntimeError: I broke\n")
    for rank in (0, 2):
        os.kill(engine.processes[rank].pid, signal.SIGKILL)
        engine.processes[rank].wait()
    said = failure_of(engine)
    assert "rank 0 was ended by SIGKILL while it served; rank 2 was ended by SIGKILL" in said
    assert "Rank 0 says: RuntimeError: peer gone." in said
    assert "Rank 2 says: RuntimeError: I broke." in said
    assert "rank 1" not in said


def test_a_hang_shows_every_ranks_stack_and_last_collective(start):
    engine = start("hangs", seconds=3)
    said = failure_of(engine)
    assert "not done after " in said
    for rank in range(2):
        assert f"Rank {rank}, starting; last collective {rank + 40}: all_reduce tp:0 (3, 4)" in said
    assert said.count("in hang_in_a_collective") == 2, said
    assert_nothing_runs(engine)


def test_results_count_though_a_rank_hangs_at_its_end(start):
    engine = start("hangs at exit", seconds=60)
    started = time.monotonic()
    results = results_of(engine)
    assert [r["rank"] for r in results] == [0, 1]
    assert time.monotonic() - started < 30, "not the engine's own deadline"
    assert_nothing_runs(engine)


def test_a_child_that_a_rank_left_is_ended(start):
    engine = start("leaves a child")
    results_of(engine)
    assert_ended([int(wait_for(engine.folder / f"rank{rank}.child")) for rank in range(2)])


def test_children_in_sessions_of_their_own_are_ended(start):
    engine = start("has children")
    children = [int(wait_for(engine.folder / f"rank{rank}.child")) for rank in range(2)]
    assert all(map(runs, children))
    engine.end()
    assert_nothing_runs(engine)
    assert_ended(children)


@pytest.mark.parametrize(
    ("fault", "behaviour", "found"),
    [
        ("kill-start", "hangs", "rank 1 was ended by SIGKILL while it started"),
        ("kill-serving", "serves on", "rank 1 was ended by SIGKILL while it served"),
        ("environment", "compares settings", "VLLM_DCP_MLA_MERGE_LIMIT_BYTES"),
        ("no-plugin", "compares settings", "{'VLLM_PLUGINS': 'none'}"),
        ("port-taken", "binds the port", "Rank 0 says: OSError: [Errno 98] Address already in use"),
    ],
)
def test_a_planted_fault_is_found(start, fault, behaviour, found):
    assert found in failure_of(start(behaviour, fault=FAULTS[fault]))


@pytest.mark.parametrize(("fault", "noticed"), [("kill-start", True), ("environment", False)])
def test_a_killed_rank_is_noticed_soon(start, fault, noticed):
    behaviour = "hangs" if noticed else "compares settings"
    found = failure_of(start(behaviour, fault=FAULTS[fault]))
    assert bool(re.search(r"Noticed \d\.\d s after it was planted\.", found)) == noticed


def test_every_fault_is_tested():
    (mark,) = test_a_planted_fault_is_found.pytestmark
    assert {arguments[0] for arguments in mark.args[1]} == set(FAULTS)


@pytest.mark.parametrize("behaviour", ["compares settings", "binds the port"])
def test_without_a_fault_the_same_ranks_are_fine(start, behaviour):
    assert len(results_of(start(behaviour))) == 2


def test_a_fault_strikes_rank_1_alone(start, monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    results = results_of(start("environment", fault=FAULTS["no-plugin"]))
    assert [r["environment"].get("VLLM_PLUGINS") for r in results] == [None, "none"]


def test_a_taken_port_is_held_until_the_end(start):
    engine = start("hangs", fault=FAULTS["port-taken"])
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(("127.0.0.1", engine._port))
    engine.end()
    with socket.socket() as other:
        other.bind(("127.0.0.1", engine._port))


@pytest.mark.parametrize(
    ("given", "quiet"),
    [("32768\t60999\n", True), ("10050 60999", True), ("1024 65535", False), (None, False)],
)
def test_a_port_that_no_connection_takes_where_there_is_one(tmp_path, monkeypatch, given, quiet):
    ports = tmp_path / "ports"
    if given is not None:
        ports.write_text(given)
    monkeypatch.setattr(launch, "_CONNECTION_PORTS", ports)
    held, port = launch._free_port()
    with held:
        assert port == held.getsockname()[1]
        assert not quiet or launch._FIRST_PORT <= port < int(given.split()[0])


def test_no_port_at_all_is_said(monkeypatch):
    def taken(self, address):
        raise OSError("Address already in use")

    class Taken(socket.socket):
        bind = taken

    monkeypatch.setattr(launch.socket, "socket", Taken)
    with pytest.raises(MachineError, match=r"no port of 127\.0\.0\.1 is free"):
        launch._free_port()


def test_a_port_is_free_without_that_fault(start):
    with socket.socket() as other:
        other.bind(("127.0.0.1", start("hangs")._port))


PARENT = """
import os, sys, time
from pathlib import Path
from vllm_dcp_mla.rehearse.processes import die_with_parent
from subprocess import Popen
child = "import sys, time; from vllm_dcp_mla.rehearse.processes import die_with_parent; "
child += "die_with_parent(int(sys.argv[1])); print('ready', flush=True); time.sleep(600)"
Popen([sys.executable, "-c", child, str(os.getpid())], start_new_session=True)
time.sleep(600)
"""


def test_a_parent_that_is_killed_leaves_no_rank():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout.readline() == b"ready\n"
        (child,) = psutil.Process(parent.pid).children()
        parent.kill()
        parent.wait()
    assert_ended([child.pid])


def test_a_rank_whose_parent_has_ended_does_not_start():
    program = "from vllm_dcp_mla.rehearse.processes import die_with_parent; die_with_parent(2**22)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "the parent ended before this process started" in done.stderr


PYDANTIC = "pydantic_core._pydantic_core.ValidationError: 1 validation error for ParallelConfig"


@pytest.mark.parametrize(
    ("log", "error"),
    [
        ("", ""),
        ("all is well: no error here\nINFO Errors: 0\n", ""),
        ("ValueError: first\nRuntimeError: second\n", "RuntimeError: second"),
        ("[rank1]: RuntimeError: NCCL failed\n", "RuntimeError: NCCL failed"),
        (
            "torch.distributed.DistNetworkError: The server socket has failed to listen\nbye\n",
            "torch.distributed.DistNetworkError: The server socket has failed to listen",
        ),
        ("AssertionError\n", "AssertionError"),
        (
            "Fatal Python error: Segmentation fault\n\nThread",
            "Fatal Python error: Segmentation fault",
        ),
        ("x: CUDA out of memory. Tried\n", "x: CUDA out of memory. Tried"),
        (
            '    raise ValueError("a: b")\nKeyError: 3\n    raise ValueError("c: d")\n',
            "KeyError: 3",
        ),
        (
            f"{PYDANTIC}\n  Value error, tp is odd [type=value_error]\n    For more\n",
            f"{PYDANTIC} Value error, tp is odd [type=value_error]",
        ),
        (
            f"[rank0]: {PYDANTIC}\n[rank0]:   Value error, tp is odd\n",
            f"{PYDANTIC} Value error, tp is odd",
        ),
        (
            "[rank1]: a.AgreementError: they differ.\n[rank1]: - X is 1\n[rank1]: - Y is 2\n\n- no",
            "a.AgreementError: they differ. - X is 1 - Y is 2",
        ),
    ],
)
def test_the_last_error_of_a_log(tmp_path, log, error):
    (tmp_path / "log").write_text(log)
    assert error_of(tmp_path / "log") == error


def test_a_log_that_is_missing_or_no_text(tmp_path):
    assert error_of(tmp_path / "none") == ""
    (tmp_path / "log").write_bytes(b"\xff\xfeRuntimeError: x\nOSError: \xff\n")
    assert error_of(tmp_path / "log") == "OSError: \N{REPLACEMENT CHARACTER}"


def test_an_event_that_is_half_written_is_not_read(tmp_path):
    files = RankFiles(tmp_path, 0)
    assert files.last_event() == {}
    files.event("served", done=3, of=9)
    with files.events.open("a") as file:
        file.write('{"event": "do')
    assert files.last_event() == {"event": "served", "done": 3, "of": 9}


def test_progress_says_how_far_it_is(start):
    engine = start("serves on")
    wait_for(engine.folder / "rank0.events")
    until = time.monotonic() + 20
    while not re.fullmatch(r"engine: \d+ of 6000 requests", engine.progress()):
        assert time.monotonic() < until, engine.progress()
        time.sleep(0.02)


def test_a_real_rank_ends_where_its_parent_has(tmp_path):
    done = subprocess.run(
        [*Engine.__dataclass_fields__["command"].default, str(tmp_path), str(2**22)],
        env={**os.environ, **environment(spec(1), 0, 0, 1)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "the parent ended before this process started" in done.stderr
