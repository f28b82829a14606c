"""Checkpoints of real dims, written once, and configs of toy dims."""

import pytest

from vllm_dcp_mla.rehearse.config import small_config

MODELS = ("glm-5.2", "deepseek-v3.2")


@pytest.fixture(scope="session", params=MODELS)
def written(request, tmp_path_factory):
    """A :class:`RehearsalModel` of real attention dims, with index_topk 512."""
    pytest.importorskip("safetensors.torch")
    from vllm_dcp_mla.rehearse.checkpoint import write_checkpoint

    folder = tmp_path_factory.mktemp("checkpoint") / request.param
    return write_checkpoint(request.param, folder, index_topk=512)


@pytest.fixture(params=MODELS)
def toy(request, monkeypatch):
    """A config with a released model's flags and dims for a test of a second."""
    pytest.importorskip("torch")
    from vllm_dcp_mla.rehearse import weights

    # So few heads, were they as alike as usual, would give several keys a score of exactly 0.
    monkeypatch.setattr(weights, "INDEX_SHARED", 0.3)
    config = small_config(request.param)
    return config | {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "vocab_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "qk_head_dim": 40,
        "head_dim": 24,
        "v_head_dim": 20,
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 16,
    }


@pytest.fixture(autouse=True)
def no_gpus_of_others(monkeypatch):
    """Other tests of this process may have hidden all GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
