"""Specs, quantisations and checkpoints: what a folder or a built-in name leads to."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dcp_mla.models import BUILT_IN, load_config
from vllm_dcp_mla.planner.checkpoint import INDEX_FILE, Weight, computed_weights
from vllm_dcp_mla.planner.model import ModelMemoryError, read_model
from vllm_dcp_mla.planner.model_spec import REQUIRED, read_model_spec
from vllm_dcp_mla.planner.quantization import Quantization, read_quantization
from vllm_dcp_mla.planner.weights import Kind, checkpoint_bytes, rank_weights

GLM = load_config("glm-5.2")
FP8_BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}
#: A model of a few kilobytes with every kind of tensor.
SMALL = {
    **GLM,
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "q_lora_rank": 128,
    "index_n_heads": 2,
    "index_topk_freq": 2,
    "max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    ("name", "parameters", "gigabytes"),
    [
        # 744 billion parameters without MTP, as GLM-5 is announced; 465 GB for NVFP4 and 689 GB
        # for DeepSeek-V3.2 are the published checkpoints.
        ("glm-5.2", 744e9, None),
        ("glm-5.2-nvfp4", 744e9, 465),
        ("deepseek-v3.2", 672e9, 689),
    ],
)
def test_built_in_models_have_their_published_size(name, parameters, gigabytes):
    model = read_model(name, load_config(name))
    head = model.spec.vocab_size * model.spec.hidden_size
    own = [w for w in model.weights if f"layers.{model.spec.layers}." not in w.name]
    assert sum(w.elements for w in own) == pytest.approx(parameters, rel=0.003)
    if gigabytes:
        # Embedding and head of the MTP layer are counted once in some checkpoints.
        assert model.checkpoint_bytes - 4 * head <= gigabytes * 1.005e9
        assert model.checkpoint_bytes >= gigabytes * 0.995e9


def test_built_in_models_differ_in_bytes_alone():
    specs = {n: read_model_spec(load_config(n), n) for n in BUILT_IN if n.startswith("glm")}
    assert len(set(map(repr, specs.values()))) == 1
    assert specs["glm-5.2"].indexer_layers[:5] == (0, 1, 2, 6, 10)
    assert len(specs["glm-5.2"].indexer_layers) == 21
    deepseek = read_model_spec(load_config("deepseek-v3.2"), "")
    assert deepseek.indexer_layers == tuple(range(61))
    assert not deepseek.shares_indices


def test_an_index_pattern_decides_layer_by_layer():
    config = {**GLM, "num_hidden_layers": 4, "index_topk_pattern": "FSS"}
    assert read_model_spec(config, "").indexer_layers == (0, 3)


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_field_is_named(key):
    config = {name: value for name, value in GLM.items() if name != key}
    with pytest.raises(ModelMemoryError, match=rf"no usable {key} \(left out\):"):
        read_model("glm-5.2", config)


@pytest.mark.parametrize("value", [0, -1, "6144", None, True, 6144.0, 1 << 40])
def test_a_field_that_is_no_count_is_named(value):
    with pytest.raises(ModelMemoryError, match=re.escape(f"hidden_size ({value!r}): the memory")):
        read_model("glm-5.2", {**GLM, "hidden_size": value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 1 << 20),
        ("num_nextn_predict_layers", 1 << 20),
        ("num_nextn_predict_layers", "1"),
        ("n_shared_experts", -1),
        ("first_k_dense_replace", "3"),
        ("moe_layer_freq", 0),
        ("index_topk_freq", 0),
        ("index_skip_topk_offset", [3]),
        ("index_topk_pattern", 3),
        ("rope_parameters", [8000000]),
        ("rope_scaling", {"rope_type": "yarn", "factor": "40"}),
        ("rope_scaling", {"rope_type": "yarn", "factor": float("inf")}),
    ],
)
def test_a_field_that_is_something_else_is_named(key, value):
    with pytest.raises(ModelMemoryError, match=key):
        read_model("glm-5.2", {**GLM, key: value})


@pytest.mark.parametrize(
    "key", ["n_shared_experts", "first_k_dense_replace", "moe_layer_freq", "index_topk_freq"]
)
def test_a_field_with_a_default_may_be_null_or_left_out(key):
    without = {name: value for name, value in GLM.items() if name != key}
    assert read_model_spec({**GLM, key: None}, "") == read_model_spec(without, "")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=5,
)
sections = st.dictionaries(
    st.sampled_from(["quant_method", "quant_algo", "weight_block_size", "ignore", "rope_type"]),
    st.sampled_from(["fp8", "modelopt", "NVFP4", [128, 128], [0, 0], ["*mlp*"]]) | json_values,
)


@settings(max_examples=200, deadline=None)
@given(
    key=st.sampled_from([*sorted(GLM), "quantization_config", "index_topk_pattern"]),
    value=json_values | sections,
)
def test_any_config_is_read_or_named(key, value):
    try:
        said = str(len(read_model("glm-5.2", {**SMALL, key: value}).weights)) + "."
    except ModelMemoryError as error:
        said = str(error)
    assert said.endswith(".")
    assert said != "0."


@pytest.mark.parametrize(
    ("section", "method"),
    [
        (None, "none"),
        (FP8_BLOCK, "fp8_block"),
        ({"quant_method": "fp8"}, "fp8_tensor"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8_tensor"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt_fp4"}, "nvfp4"),
    ],
)
def test_known_quantisations(section, method):
    assert read_quantization({**GLM, "quantization_config": section}).method == method


@pytest.mark.parametrize(
    "section",
    [{"quant_method": "gptq"}, {}, "fp8", {"quant_method": "modelopt", "quant_algo": "W"}],
)
def test_an_unknown_quantisation_is_named(section):
    with pytest.raises(ModelMemoryError, match="quant"):
        read_model("glm-5.2", {**GLM, "quantization_config": section})


def test_bytes_of_a_linear_layer():
    assert Quantization().linear_bytes("m", 256, 512) == 256 * 512 * 2
    # 28 heads' rows do not fill their last block.
    assert Quantization("fp8_block").linear_bytes("m", 160, 512) == 160 * 512 + 2 * 4 * 4
    assert Quantization("nvfp4").linear_bytes("m", 256, 512) == 256 * 512 * 9 // 16 + 8
    assert Quantization("nvfp4", ignore=("*self_attn*",)).is_ignored("model.layers.3.self_attn.q")


def write_checkpoint(folder, quantization, shards=2):
    """A folder with the tensors that a config leads to, stored as safetensors."""
    numpy = pytest.importorskip("numpy")
    save_file = pytest.importorskip("safetensors.numpy").save_file
    (folder / "config.json").write_text(json.dumps(SMALL))
    weights = computed_weights(read_model_spec(SMALL, ""), quantization)
    names = {}
    for shard in range(shards):
        file = f"model-{shard}.safetensors"
        tensors = {w.name: numpy.zeros(w.bytes, numpy.uint8) for w in weights[shard::shards]}
        save_file(tensors, folder / file)
        names |= dict.fromkeys(tensors, file)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": names}))
    return weights


def test_a_folder_is_read_from_its_headers(tmp_path):
    # No quantization_config: only the files show that a weight takes a byte.
    written = write_checkpoint(tmp_path, Quantization("fp8_block"))
    model = read_model(str(tmp_path), SMALL)
    assert model.weights_from == "headers of 2 safetensors files"
    assert model.checkpoint_bytes == checkpoint_bytes(written)
    computed = checkpoint_bytes(computed_weights(model.spec, Quantization()))
    assert model.checkpoint_bytes < computed
    (tmp_path / INDEX_FILE).unlink()
    assert read_model(str(tmp_path), SMALL).checkpoint_bytes == model.checkpoint_bytes


def test_a_folder_without_weights_is_computed(tmp_path):
    model = read_model(str(tmp_path), SMALL)
    assert model.weights_from == "computed from config.json"
    assert model.weights == computed_weights(model.spec, Quantization())


def test_half_a_checkpoint_is_refused(tmp_path):
    write_checkpoint(tmp_path, Quantization())
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ModelMemoryError, match=r"1 of the 2 files .* model-1\.safetensors"):
        read_model(str(tmp_path), SMALL)


def test_some_of_the_numbered_files_are_no_checkpoint(tmp_path):
    pytest.importorskip("safetensors")
    write_checkpoint(tmp_path, Quantization())
    (tmp_path / "model.safetensors.index.json").unlink()
    for number, file in enumerate(sorted(tmp_path.glob("*.safetensors")), 1):
        file.rename(tmp_path / f"model-{number:05}-of-00002.safetensors")
    model = read_model(str(tmp_path), SMALL)
    assert model.weights_from == "headers of 2 safetensors files"
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    (tmp_path / "other.safetensors").mkdir()  # no file
    with pytest.raises(ModelMemoryError, match="holds 1 of 2 numbered files"):
        read_model(str(tmp_path), SMALL)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs", b"\xff" * 64])
def test_a_file_that_is_no_checkpoint_is_named(tmp_path, content):
    pytest.importorskip("safetensors")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelMemoryError, match=r"model\.safetensors cannot be read"):
        read_model(str(tmp_path), SMALL)


@pytest.mark.parametrize("content", ["", "[]", '{"weight_map": 3}', "{}"])
def test_an_index_that_is_none_is_named(tmp_path, content):
    (tmp_path / INDEX_FILE).write_text(content)
    with pytest.raises(ModelMemoryError, match="cannot be read"):
        read_model(str(tmp_path), SMALL)


def test_every_tensor_is_sharded_by_its_kind():
    spec = read_model_spec(SMALL, "")
    weights = computed_weights(spec, Quantization())
    alone = rank_weights(weights, spec, 1, 1, drafter=True)
    shared = rank_weights(weights, spec, 4, 2, drafter=False)
    drafter_head = 2 * 2 * spec.vocab_size * spec.hidden_size
    assert sum(alone.values()) == checkpoint_bytes(weights) - drafter_head
    divisors = {Kind.EXPERTS: 8, Kind.HEADS: 4, Kind.MLP: 4, Kind.VOCABULARY: 4, Kind.REPLICATED: 1}
    assert {kind: alone[kind] / size for kind, size in shared.items()} == divisors
    assert Kind.ABSORBED not in alone


def test_a_quantised_key_value_projection_is_kept_twice():
    spec = read_model_spec(SMALL, "")
    weights = computed_weights(spec, Quantization("fp8_block"))
    one = spec.heads * (spec.qk_nope_head_dim + spec.v_head_dim) * spec.kv_lora_rank * 2
    for tp in (1, 4):
        absorbed = rank_weights(weights, spec, tp, 1, drafter=False)[Kind.ABSORBED]
        assert absorbed == spec.layers * one // tp


def test_the_indexers_key_projection_is_loaded_as_bfloat16():
    spec = read_model_spec(SMALL, "")
    plain, fp8 = (
        rank_weights(computed_weights(spec, q), spec, 1, 1, drafter=False)[Kind.REPLICATED]
        for q in (Quantization(), Quantization("fp8_block", ignore=("*q_a*", "*kv_a*", "*wq_b*")))
    )
    assert fp8 - plain == pytest.approx(0, abs=64)


def test_the_indexer_s_keys_are_normed_in_float32():
    spec = read_model_spec(SMALL, "small")
    stored = [Weight("model.layers.0.self_attn.indexer.k_norm.weight", 128, 2 * 128)]
    assert rank_weights(stored, spec, 2, 1, drafter=False) == {Kind.REPLICATED: 4 * 128}
