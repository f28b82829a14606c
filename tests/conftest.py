"""Tests of vLLM-facing parts run on vLLM's CPU platform, with Triton interpreted."""

import importlib.util
import os

# Before NumPy is imported: threads of its small products took Triton's interpreter four times as
# long as one does, on a machine with two cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from hypothesis import settings

# A deadline measures this machine, not the code.
settings.register_profile("default", deadline=None)
settings.load_profile("default")

HAS_VLLM = importlib.util.find_spec("vllm") is not None


def pytest_addoption(parser):
    parser.addoption("--support-file", help="Write what the installed vLLM's support is to a file.")


def pytest_configure(config):
    file = config.getoption("--support-file")
    # Where tests run in several processes, the one that starts those hears of every test.
    if file and not hasattr(config, "workerinput"):
        from support import Recorder

        config.pluginmanager.register(Recorder(file))


def pytest_collection_modifyitems(items):
    if HAS_VLLM:
        return
    skip = pytest.mark.skip(reason="vLLM is not installed")
    for item in items:
        if "vllm" in item.keywords or "slow" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def cpu_vllm():
    """This process's vLLM on the CPU, with the plugin registered."""
    from vllm_dcp_mla.selftest import world

    world.prepare("cpu")


@pytest.fixture(scope="session")
def vllm_process():
    """A process of vLLM as on a B200, without the plugin, to fork cases from."""
    from vllm_process import VllmProcess

    with VllmProcess() as process:
        yield process


@pytest.fixture
def no_buffers(monkeypatch):
    """Device buffers as in a fresh process."""
    from vllm_dcp_mla import device_buffer

    monkeypatch.setattr(device_buffer, "_BY_DEVICE", {})
    monkeypatch.setattr(device_buffer, "_PARTIALS", {})
    monkeypatch.setattr(device_buffer, "_GATHERED", {})


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """No setting of the surrounding shell reaches a test."""
    import os

    for name in list(os.environ):
        if name.startswith("VLLM_DCP_MLA_") or name in (
            "COLUMNS",
            "VLLM_PLUGINS",
            "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE",
        ):
            monkeypatch.delenv(name)
