"""Rehearsals on a GPU, good and broken; run with ``pytest tests/gpu -m gpu``.

The SM100 classes run with the reference kernel. Ranks share a GPU where there are too few, which
needs NCCL 2.30 or newer in LD_PRELOAD and VLLM_NCCL_SO_PATH.
"""

import json
import os
import subprocess
import sys
import tempfile
import time

import psutil
import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]

SMALL = ("--index-topk", "512", "--max-num-batched-tokens", "2048")


@pytest.fixture
def rehearse():
    """Runs a rehearsal: exit status, answer, seconds. Nothing of it may be left running."""
    # Sockets have short names.
    with tempfile.TemporaryDirectory(prefix="r") as folder:
        yield lambda *arguments, **variables: run(folder, *arguments, **variables)


def run(folder, *arguments, **variables):
    environment = {**os.environ, "VLLM_DCP_MLA_KERNEL": "reference", "TMPDIR": folder, **variables}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "vllm_dcp_mla.cli.main", "rehearse", *arguments, "--json"],
        env={name: value for name, value in environment.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert not [process for process in psutil.process_iter() if belongs_to(process, folder)]
    return done.returncode, json.loads(done.stdout), time.monotonic() - started


def belongs_to(process, folder):
    try:
        return process.environ().get("TMPDIR") == folder
    except psutil.Error:
        return False


def test_a_rehearsal_agrees_with_one_rank(rehearse):
    status, answer, _ = rehearse(*SMALL, "--kv-cache-dtype", "bfloat16")
    assert status == 0, answer["problems"]
    assert all("DcpFlashInferMLASparse" in engine["ran"] for engine in answer["engines"].values())


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("kill-start", "rank 1 was ended by SIGKILL while it started"),
        ("kill-serving", "rank 1 was ended by SIGKILL while it served"),
        ("environment", "VLLM_DCP_MLA_MERGE_LIMIT_BYTES"),
        ("no-plugin", "rank 1"),
        ("port-taken", "in use"),
    ],
)
def test_a_fault_is_named(rehearse, fault, said):
    status, answer, seconds = rehearse(*SMALL, "--break", fault)
    assert status == 1
    (problem,) = answer["problems"]
    print(f"{fault}, {seconds:.0f} s after the command: {problem}")
    assert said in problem


def test_too_little_memory_is_said_before_anything_starts(rehearse):
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(free - (8 << 30), dtype=torch.uint8, device="cuda")
    status, answer, seconds = rehearse(*SMALL)
    del held
    assert status == 1
    assert "GiB free" in answer["problems"][0]
    assert seconds < 60


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="ranks need not share a GPU here")
def test_an_old_nccl_is_said_before_anything_starts(rehearse):
    old = {"LD_PRELOAD": None, "VLLM_NCCL_SO_PATH": None}
    status, answer, seconds = rehearse(*SMALL, **old)
    if torch.cuda.nccl.version() >= (2, 30) and "LD_PRELOAD" not in os.environ:
        pytest.skip("torch's own NCCL is new enough")
    assert status == 1
    assert "NCCL" in answer["problems"][0]
    assert seconds < 60


def test_a_folder_without_a_config_is_said(rehearse, tmp_path):
    status, answer, _ = rehearse("--model", str(tmp_path))
    assert status == 2
    assert "config.json" in answer["problems"][0]
