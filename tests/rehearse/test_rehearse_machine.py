import os
import subprocess
import sys

import pytest

from vllm_dcp_mla.rehearse import machine as module
from vllm_dcp_mla.rehearse.machine import LocalGpu, Machine, MachineError, examine, ranks_per_gpu

GIB = 1 << 30


def machine(gpus, nccl=(2, 30, 3)):
    one = LocalGpu(name="NVIDIA H200", arch=(9, 0), total_bytes=141 * GIB, free_bytes=140 * GIB)
    return Machine(gpus=(one,) * gpus, nccl=nccl, versions={"torch": "2.12"})


@pytest.fixture
def probe(tmp_path, monkeypatch):
    """Sets what the probing process does instead."""

    def put(source):
        script = tmp_path / "probe.py"
        script.write_text(source)
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{script}"\n')
        python.chmod(0o755)
        monkeypatch.setattr(module.sys, "executable", str(python))

    monkeypatch.setattr(module, "package_folder", lambda name: "/somewhere")
    return put


def test_a_machine_with_gpus_is_read_after_what_libraries_print(probe):
    expected = machine(2)
    probe(f"print('a library says hello')\nprint('''{expected.model_dump_json()}''')")
    assert examine() == expected


def test_no_gpu(probe):
    probe(f"print('''{machine(0).model_dump_json()}''')")
    with pytest.raises(MachineError, match="torch sees no GPU here; a rehearsal needs one"):
        examine()


def test_a_probe_that_fails_says_why(probe):
    probe("raise OSError('libcudart.so.13: cannot open shared object file')")
    with pytest.raises(MachineError, match=r"torch cannot use .*: OSError: libcudart\.so\.13"):
        examine()


def test_a_probe_that_dies_silently(probe):
    probe("import os; os.kill(os.getpid(), 9)")
    with pytest.raises(MachineError, match="no message"):
        examine()


def test_a_probe_that_hangs_is_ended(probe, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_PROBE_SECONDS", 1)
    probe("import time; time.sleep(600)")
    with pytest.raises(MachineError, match="within 1 s; see nvidia-smi"):
        examine()


def test_without_vllm(monkeypatch):
    monkeypatch.setattr(module, "package_folder", lambda name: None)
    with pytest.raises(MachineError, match=r"pip install 'vllm-dcp-mla\[vllm\]'"):
        examine()


@pytest.mark.parametrize(
    ("gpus", "ranks", "wanted", "share"),
    [
        (8, 8, None, 1),
        (1, 4, None, 4),
        (2, 3, None, 2),
        (4, 2, None, 1),
        (4, 4, 2, 2),
        (1, 2, 8, 8),
    ],
)
def test_as_few_ranks_share_a_gpu_as_work(gpus, ranks, wanted, share):
    assert ranks_per_gpu(machine(gpus), ranks, wanted) == share


def test_too_few_gpus_for_the_users_number():
    with pytest.raises(MachineError) as caught:
        ranks_per_gpu(machine(2), 8, 1)
    assert str(caught.value) == (
        "--ranks-per-gpu 1 leaves room for 2 ranks on 2 GPU(s), and 8 are needed; give 4 or more, "
        "or auto."
    )


@pytest.mark.parametrize("nccl", [(2, 29, 7), (2, 3, 90), (1, 31, 0)])
def test_an_old_nccl_shares_no_gpu(nccl):
    with pytest.raises(MachineError) as caught:
        ranks_per_gpu(machine(1, nccl), 2, None)
    found = ".".join(map(str, nccl))
    assert f"2 ranks on 1 GPU(s) must share, and NCCL {found} refuses that" in str(caught.value)
    assert "nvidia-nccl-cu13>=2.30" in str(caught.value)
    assert ranks_per_gpu(machine(2, nccl), 2, None) == 1, "with a GPU each, any does"


@pytest.mark.parametrize("nccl", [(2, 30, 0), (2, 31, 1), (3, 0, 0)])
def test_a_new_nccl_shares_a_gpu(nccl):
    assert ranks_per_gpu(machine(1, nccl), 2, None) == 2


@pytest.mark.vllm
@pytest.mark.slow
def test_the_real_probe_sees_no_gpu_where_all_are_hidden():
    done = subprocess.run(
        [sys.executable, "-m", module.__name__],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = Machine.model_validate_json(done.stdout.splitlines()[-1])
    assert (found.gpus, found.nccl) == ((), (0, 0, 0))
    assert found.versions["torch"]
