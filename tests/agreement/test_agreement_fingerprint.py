"""What a rank says of itself."""

import os

import pytest

from release_marks import since

pytest.importorskip("torch")
from vllm_dcp_mla.agreement.differences import AUTOTUNE
from vllm_dcp_mla.agreement.fingerprint import rank_fingerprint
from vllm_dcp_mla.models import load_config

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("cpu_vllm")]
LAUNCH = {"kernel": "reference", "heads": 64, "tokens_per_launch": 512}


@pytest.fixture(scope="module")
def config(cpu_vllm):
    from vllm_dcp_mla.selftest import world

    return world.engine_config(load_config("glm-5.2"), 8, 8, "a2a")


def test_all_that_ranks_must_have_in_common(config, monkeypatch):
    from importlib.metadata import version

    monkeypatch.setattr(config.scheduler_config, "max_num_batched_tokens", 4321)
    monkeypatch.setattr(config.parallel_config, "cp_kv_cache_interleave_size", 64)
    said = rank_fingerprint(config, 0, LAUNCH)
    assert said["vllm-dcp-mla"] == version("vllm-dcp-mla")
    for name in ("vllm", "torch", "triton", "flashinfer-python"):
        assert said[name] == version(name)
    assert said["vLLM in the tested range"] == "yes"
    assert (said["kernel"], said["heads"], said["tokens per launch"]) == ("reference", "64", "512")
    assert said["--cp-kv-cache-interleave-size"] == "64"
    assert said["--dcp-comm-backend"] == "a2a"
    assert said["--max-num-batched-tokens"] == "4321"
    assert said["VLLM_DCP_MLA_KERNEL"] == "reference"  # set in additional_config
    assert said["VLLM_DCP_MLA_MERGE_LIMIT_BYTES"] == str(256 << 20)
    assert all(isinstance(value, str) for value in said.values())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_DCP_MLA_MERGE_LIMIT_BYTES", "1000000"),
        ("VLLM_DCP_MLA_SLAB_LIMIT_BYTES", "600000000"),
        ("VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE", "104857600"),
        ("VLLM_FLASHINFER_ALLREDUCE_BACKEND", "trtllm"),
        ("VLLM_USE_DIRECT_DCP_A2A", "1"),
        ("VLLM_USE_DIRECT_DCP_Q_GATHER", "1"),
        ("VLLM_USE_DIRECT_DCP_KV_GATHER", "1"),
        ("VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", "64"),
        ("NCCL_ALGO", "Ring"),
        ("NCCL_PROTO", "Simple"),
        ("TRITON_INTERPRET", "0"),
    ],
)
def test_a_variable_changes_its_own_field(config, monkeypatch, name, value):
    before = rank_fingerprint(config, 0, LAUNCH)
    monkeypatch.setenv(name, value)
    after = rank_fingerprint(config, 0, LAUNCH)
    assert [field for field in after if after[field] != before[field]] == [name]


def test_a_default_that_is_written_out_is_no_difference(config, monkeypatch):
    before = rank_fingerprint(config, 0, LAUNCH)
    monkeypatch.setenv("VLLM_FLASHINFER_ALLREDUCE_BACKEND", "auto")
    monkeypatch.setenv("VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", "512")
    monkeypatch.setenv("VLLM_DCP_MLA_MERGE_LIMIT_BYTES", str(256 << 20))
    assert rank_fingerprint(config, 0, LAUNCH) == before


def test_nothing_private_and_nothing_local_is_said(config, monkeypatch):
    before = rank_fingerprint(config, 0, LAUNCH)
    for name in (
        *("VLLM_API_KEY", "HF_TOKEN", "VLLM_DCP_MLA_PASSWORD", "NCCL_SOCKET_IFNAME"),
        *("NCCL_DEBUG_FILE", "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR", "S3_SECRET_ACCESS_KEY"),
    ):
        monkeypatch.setenv(name, "hunter2")
    assert rank_fingerprint(config, 0, LAUNCH) == before
    assert not any("hunter2" in value for value in before.values())
    assert os.environ["PATH"] not in before.values()


@since(33, "no autotune results by rank")
def test_autotune_results_of_this_rank_are_found(config, monkeypatch, tmp_path):
    from vllm.platforms import current_platform

    monkeypatch.setattr(config.kernel_config, "enable_flashinfer_autotune", True)
    assert rank_fingerprint(config, 1, LAUNCH)[AUTOTUNE] == "not used"  # no GPU
    monkeypatch.setattr(type(current_platform), "has_device_capability", lambda *args: True)
    monkeypatch.setenv("VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR", str(tmp_path))
    assert rank_fingerprint(config, 1, LAUNCH)[AUTOTUNE] == "not there"
    (tmp_path / "hash").mkdir()
    (tmp_path / "hash" / "autotune_configs_dp0_rank1.json").write_text("{}")
    assert rank_fingerprint(config, 1, LAUNCH)[AUTOTUNE] == "there"
    assert rank_fingerprint(config, 2, LAUNCH)[AUTOTUNE] == "not there"
    monkeypatch.setattr(config.kernel_config, "enable_flashinfer_autotune", False)
    assert rank_fingerprint(config, 1, LAUNCH)[AUTOTUNE] == "not used"
