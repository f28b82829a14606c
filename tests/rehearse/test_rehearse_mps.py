import os
import stat
import sys
import time
from pathlib import Path

import psutil
import pytest

from vllm_dcp_mla.rehearse import mps
from vllm_dcp_mla.rehearse.mps import MultiProcessService

#: What shows the second of the two GPUs that the caller has.
THEIRS = {"CUDA_VISIBLE_DEVICES": "7"}
#: The control daemon in the foreground, with a server as its child.
SERVES = """
import os, pathlib, socket, subprocess, sys, time
pipes = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
logs = pathlib.Path(os.environ["CUDA_MPS_LOG_DIRECTORY"])
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
(logs / "gpus").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
(logs / "seen").write_text(f"{os.getpid()} {child.pid} {sys.argv[1:]}")
for name in ("control_privileged", "control"):
    socket.socket(socket.AF_UNIX).bind(str(pipes / name))
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def no_service(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,7")
    monkeypatch.setattr(mps, "_DEFAULT_PIPES", tmp_path / "nvidia-mps")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


@pytest.fixture
def control(tmp_path):
    """Puts a control daemon of the given source on PATH."""

    def put(source):
        path = tmp_path / "bin" / "nvidia-cuda-mps-control"
        path.parent.mkdir()
        path.write_text(f"#!{sys.executable} -S\n{source}")
        path.chmod(0o755)

    return put


@pytest.fixture
def service(tmp_path):
    made = MultiProcessService(tmp_path / "m")
    yield made
    made.stop()


def ended(pid, seconds=10):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_a_service_starts_and_ends_with_its_children(control, service, tmp_path):
    control(SERVES)
    assert mps.available()
    variables = service.start((1,))
    folder = tmp_path / "m"
    if len(str(folder)) <= mps._MAX_FOLDER_BYTES:
        assert variables["CUDA_MPS_PIPE_DIRECTORY"] == str(folder)
    assert variables["CUDA_MPS_LOG_DIRECTORY"] == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (Path(variables["CUDA_MPS_PIPE_DIRECTORY"]) / "control").exists()
    assert (folder / "gpus").read_text() == "7"
    assert variables["CUDA_VISIBLE_DEVICES"] == "0", "the service numbers anew what it was shown"
    daemon, server, arguments = (folder / "seen").read_text().split(" ", 2)
    assert arguments == "['-f']", "in the foreground, so that it can be ended"
    service.stop()
    assert ended(int(daemon))
    assert ended(int(server))


def test_sockets_in_a_long_folder_are_elsewhere_and_removed(control, tmp_path):
    control(SERVES)
    folder = tmp_path / ("long" * 25)
    service = MultiProcessService(folder)
    try:
        variables = service.start((1,))
        pipes = Path(variables["CUDA_MPS_PIPE_DIRECTORY"])
        assert len(os.fsencode(pipes / "control_privileged")) <= 107
        assert stat.S_IMODE(pipes.stat().st_mode) == 0o700
        assert variables["CUDA_MPS_LOG_DIRECTORY"] == str(folder)
    finally:
        service.stop()
    assert not pipes.exists()


def test_a_service_that_dies_is_none(control, service):
    control("raise SystemExit(1)")
    started = time.monotonic()
    assert service.start((1,)) == THEIRS
    assert time.monotonic() - started < mps._START_SECONDS, "not waited for once it has ended"


def test_a_service_that_never_listens_is_ended(control, service, monkeypatch, tmp_path):
    monkeypatch.setattr(mps, "_START_SECONDS", 1.5)
    control(
        "import os, pathlib, time\n"
        'logs = pathlib.Path(os.environ["CUDA_MPS_LOG_DIRECTORY"])\n'
        '(logs / "pid").write_text(str(os.getpid()))\n'
        "time.sleep(600)\n"
    )
    assert service.start((1,)) == THEIRS
    assert ended(int((tmp_path / "m" / "pid").read_text()))


def test_without_a_control_program_there_is_none(service, tmp_path):
    assert not mps.available()
    assert service.start((1,)) == THEIRS
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("how", ["variable", "default folder"])
def test_one_that_runs_already_is_used(control, service, monkeypatch, tmp_path, how):
    control("raise SystemExit('a second one must not start')")
    if how == "variable":
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/theirs")
    else:
        (tmp_path / "nvidia-mps").mkdir()
        (tmp_path / "nvidia-mps" / "control").touch()
    assert mps.available()
    assert service.start((1,)) == THEIRS
    assert not (tmp_path / "m").exists()


def test_stopping_what_did_not_start_is_fine(service):
    service.stop()
