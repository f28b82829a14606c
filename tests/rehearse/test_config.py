import json

import pytest

from vllm_dcp_mla.models import ModelConfigError, UnservedModelError, load_config
from vllm_dcp_mla.rehearse.config import followers, leader, small_config

#: What a rehearsal is about, and so stays as released.
KEPT = (
    *("architectures", "model_type", "num_attention_heads", "num_key_value_heads", "rms_norm_eps"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("index_topk", "index_head_dim", "index_n_heads", "index_topk_freq", "rope_parameters"),
    *("indexer_rope_interleave", "rope_interleave", "rope_scaling", "rope_theta"),
    *("n_group", "topk_group", "num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor"),
    *("scoring_func", "topk_method", "n_shared_experts", "index_share_for_mtp_iteration"),
)


def folder_with(tmp_path, model="glm-5.2", **changes):
    config = load_config(model) | changes
    (tmp_path / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value != "absent"})
    )
    return str(tmp_path)


@pytest.mark.parametrize("model", ["glm-5.2", "deepseek-v3.2"])
def test_attention_and_flags_are_the_released_ones(model):
    released, small = load_config(model), small_config(model)
    assert {key: small.get(key) for key in KEPT} == {key: released.get(key) for key in KEPT}
    assert small["hidden_size"] == 1024
    assert small["num_nextn_predict_layers"] == 1
    assert small["first_k_dense_replace"] == small["num_hidden_layers"] - 1


def test_glm_has_two_leaders_and_a_follower():
    config = small_config("glm-5.2")
    assert [leader(config, layer) for layer in range(4)] == [0, 1, 1, 3]  # 3 is the MTP layer
    assert followers(config) == (2,)


def test_deepseek_has_leaders_only():
    config = small_config("deepseek-v3.2")
    assert [leader(config, layer) for layer in range(3)] == [0, 1, 2]
    assert followers(config) == ()


@pytest.mark.parametrize("model", ["glm-5.2", "deepseek-v3.2"])
def test_leaders_of_the_released_model_are_transformers_ones(model):
    transformers = pytest.importorskip("transformers")
    config = load_config(model)
    if model == "deepseek-v3.2":
        assert followers(config) == ()
        return
    types = transformers.GlmMoeDsaConfig(**config).indexer_types
    assert followers(config) == tuple(i for i, kind in enumerate(types) if kind == "shared")
    assert len(followers(config)) == 57


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"index_topk_pattern": "F" + "S" * 77}, {"index_topk_pattern": "FFS"}),
        ({"index_topk_pattern": "F" * 78}, {"index_topk_pattern": "FF", "num_hidden_layers": 2}),
        ({"indexer_types": ["full"] * 78}, {"indexer_types": ["full", "full", "shared"]}),
        ({"quantization_config": {"quant_method": "fp8"}}, {"quantization_config": None}),
        ({"auto_map": {"AutoModel": "x.Y"}}, {"auto_map": None}),
        ({"pad_token_id": 154820}, {"pad_token_id": None}),
        ({"n_shared_experts": None}, {"n_shared_experts": 1}),
        ({"topk_method": "absent"}, {"topk_method": "noaux_tc"}),
        ({"max_position_embeddings": 8192}, {"max_position_embeddings": 8192}),
        ({"num_experts_per_tok": 6, "n_group": 4, "topk_group": 1}, {"n_routed_experts": 24}),
    ],
)
def test_what_a_folder_says(tmp_path, changes, found):
    config = small_config(folder_with(tmp_path, **changes))
    assert {key: config.get(key) for key in found} == found


def test_positions_of_yarn_are_kept():
    """Its factor says how many there are, and Transformers complains where the two differ."""
    assert small_config("deepseek-v3.2")["max_position_embeddings"] == 163840
    assert small_config("glm-5.2")["max_position_embeddings"] == 16384
    longer = small_config("glm-5.2", max_model_len=131136)
    assert longer["max_position_embeddings"] == 131136


def test_other_numbers_of_keys():
    assert small_config("glm-5.2", index_topk=512)["index_topk"] == 512
    with pytest.raises(ModelConfigError, match=r"--index-topk asks for 300 .* 512, 1024, 2048"):
        small_config("glm-5.2", index_topk=300)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, UnservedModelError, "GlmMoeDsaForCausalLM"),
        ({"architectures": "absent"}, UnservedModelError, "is None"),
        ({"architectures": [["GlmMoeDsaForCausalLM"]]}, UnservedModelError, "needs one of"),
        ({"num_attention_heads": "absent"}, UnservedModelError, "num_attention_heads"),
        ({"index_topk": "absent"}, UnservedModelError, "index_topk"),
        ({"index_topk": 64}, ModelConfigError, "selects 64 keys"),
        ({"index_n_heads": "absent"}, ModelConfigError, "index_n_heads"),
        ({"q_lora_rank": None}, ModelConfigError, "q_lora_rank"),
        ({"v_head_dim": True}, ModelConfigError, "v_head_dim"),
        ({"n_group": 0}, ModelConfigError, "n_group"),
        ({"rope_scaling": 4}, ModelConfigError, "rope_scaling"),
        ({"index_topk_pattern": ["F", "S"]}, ModelConfigError, "index_topk_pattern"),
        ({"index_skip_topk_offset": "2"}, ModelConfigError, "index_skip_topk_offset"),
        ({"qk_rope_head_dim": 0}, ModelConfigError, "qk_rope_head_dim 0"),
        ({"index_head_dim": 32}, ModelConfigError, "index_head_dim 32"),
    ],
)
def test_a_config_that_cannot_be_rehearsed(tmp_path, changes, error, says):
    with pytest.raises(error, match=says):
        small_config(folder_with(tmp_path, **changes))


def test_no_folder_and_no_config(tmp_path):
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(ModelConfigError, match=r"neither a folder with a config\.json"):
            small_config(str(path))
