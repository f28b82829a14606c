"""The real ``vllm serve`` with stock vLLM, spawned processes and all, until it needs a GPU."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_dcp_mla
from vllm_dcp_mla.models import BUILT_IN
from vllm_dcp_mla.plugin import alias, overrides
from vllm_dcp_mla.simulate import driver

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

RANKS = 2
MODEL = Path(vllm_dcp_mla.__file__).parent / "models" / BUILT_IN["glm-5.2"]


@pytest.fixture
def simulated_b200(tmp_path):
    """Environment in which every process of vLLM sees B200s that are not there."""
    libraries = tmp_path / "lib"
    libraries.mkdir()
    try:
        driver.build(libraries)  # found before a real driver
    except driver.DriverStandInError as error:
        pytest.skip(str(error))
    plugins = tmp_path / "plugins" / "simulated-0.dist-info"
    plugins.mkdir(parents=True)
    (plugins / "METADATA").write_text("Metadata-Version: 2.1\nName: simulated\nVersion: 0\n")
    (plugins / "entry_points.txt").write_text(
        "[vllm.platform_plugins]\nsimulated = vllm_dcp_mla.simulate.platform:plugin\n"
    )
    # Tests on vLLM's CPU platform leave their variables in this process.
    inherited = {n: v for n, v in os.environ.items() if not n.startswith(("VLLM_", "TRITON_"))}
    return {
        **inherited,
        "PYTHONPATH": str(plugins.parent),
        "LD_LIBRARY_PATH": str(libraries),
        "DCP_MLA_SIMULATED_GPU": "b200",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_every_process_of_vllm_serve_knows_the_alias(tmp_path, simulated_b200):
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(MODEL, model / "config.json")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
            *("--skip-tokenizer-init", "--load-format", "dummy", "--max-model-len", "8192"),
            *("--tensor-parallel-size", str(RANKS)),
            *("--decode-context-parallel-size", str(RANKS)),
            *("--attention-backend", alias()),
            *("--host", "127.0.0.1", "--port", str(free_port())),
        ],
        env=simulated_b200,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    log = done.stdout.splitlines()
    registered = (
        f"vllm-dcp-mla {vllm_dcp_mla.__version__} serves sparse MLA under decode context "
        f"parallelism: {', '.join((*overrides(), alias()))}."
    )
    processes = [line.split("pid=")[0] for line in log if registered in line]
    tail = "\n".join(log[-60:])
    assert sum("EngineCore" in process for process in processes) == 1, tail
    assert sum("Worker" in process for process in processes) == RANKS, tail
    assert "Unknown attention backend" not in done.stdout
    assert "is not a valid AttentionBackendEnum" not in done.stdout
    # The first thing that needs a GPU, and nothing before it.
    assert "out of bounds for 0 devices" in done.stdout, tail
    assert done.returncode != 0
