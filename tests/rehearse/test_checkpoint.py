import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from vllm_dcp_mla.models import ModelConfigError
from vllm_dcp_mla.rehearse.config import small_config

pytestmark = pytest.mark.vllm  # which brings torch, safetensors and Transformers

ATTENTION = {
    "input_layernorm.weight": "hidden",
    "post_attention_layernorm.weight": "hidden",
    "self_attn.q_a_proj.weight": "q_rank hidden",
    "self_attn.q_a_layernorm.weight": "q_rank",
    "self_attn.q_b_proj.weight": "heads*qk q_rank",
    "self_attn.kv_a_proj_with_mqa.weight": "kv_rank+rope hidden",
    "self_attn.kv_a_layernorm.weight": "kv_rank",
    "self_attn.kv_b_proj.weight": "heads*(nope+v) kv_rank",
    "self_attn.o_proj.weight": "hidden heads*v",
}
INDEXER = {
    "self_attn.indexer.wq_b.weight": "index_heads*index_dim q_rank",
    "self_attn.indexer.wk.weight": "index_dim hidden",
    "self_attn.indexer.weights_proj.weight": "index_heads hidden",
    "self_attn.indexer.k_norm.weight": "index_dim",
    "self_attn.indexer.k_norm.bias": "index_dim",
}
MTP = {
    "embed_tokens.weight": "2048 hidden",
    "enorm.weight": "hidden",
    "hnorm.weight": "hidden",
    "eh_proj.weight": "hidden 2*hidden",
    "shared_head.norm.weight": "hidden",
    "shared_head.head.weight": "2048 hidden",
}
DIMS = {
    "glm-5.2": {
        **{"heads": 64, "q_rank": 2048, "kv_rank": 512, "nope": 192, "rope": 64, "qk": 256},
        **{"v": 256, "index_heads": 32, "index_dim": 128, "hidden": 1024},
    },
    "deepseek-v3.2": {
        **{"heads": 128, "q_rank": 1536, "kv_rank": 512, "nope": 128, "rope": 64, "qk": 192},
        **{"v": 128, "index_heads": 64, "index_dim": 128, "hidden": 1024},
    },
}
#: Layers with an indexer, and with experts; the last is the MTP layer.
LAYERS = {"glm-5.2": ("IID", "DDMM"), "deepseek-v3.2": ("II", "DMM")}


def gated(prefix, width):
    return {
        f"{prefix}gate_proj.weight": f"{width} hidden",
        f"{prefix}up_proj.weight": f"{width} hidden",
        f"{prefix}down_proj.weight": f"hidden {width}",
    }


def expected_shapes(name):
    experts = {"mlp.gate.weight": "16 hidden", "mlp.gate.e_score_correction_bias": "16"}
    for part in ("shared_experts", *(f"experts.{i}" for i in range(16))):
        experts |= gated(f"mlp.{part}.", 512)
    indexers, mlps = LAYERS[name]
    tensors = {"embed_tokens.weight": "2048 hidden", "norm.weight": "hidden"}
    for layer, kind in enumerate(mlps):
        own = ATTENTION | (experts if kind == "M" else gated("mlp.", 1024))
        if layer == len(indexers):
            own |= INDEXER | MTP
        elif indexers[layer] == "I":
            own |= INDEXER
        tensors |= {f"layers.{layer}.{key}": shape for key, shape in own.items()}
    shapes = {f"model.{key}": shape for key, shape in tensors.items()}
    shapes["lm_head.weight"] = "2048 hidden"
    return {
        key: [eval(term, {}, DIMS[name]) for term in shape.split()] for key, shape in shapes.items()
    }


def test_tensors_have_the_released_names_and_shapes(written):
    from safetensors import safe_open

    with safe_open(written.folder / "model.safetensors", "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        shapes = {name: part.get_shape() for name, part in slices.items()}
        kinds = {name: part.get_dtype() for name, part in slices.items()}
    assert shapes == expected_shapes(written.name)
    floats = [name for name, kind in kinds.items() if kind != "BF16"]
    assert floats
    assert all(name.endswith("e_score_correction_bias") for name in floats)
    assert all(kinds[name] == "F32" for name in floats)


def test_says_what_it_wrote(written):
    config = json.loads((written.folder / "config.json").read_text())
    assert config == small_config(written.name, index_topk=512)
    assert written.architecture == config["architectures"][0]
    assert written.layers == config["num_hidden_layers"]
    assert written.index_topk == config["index_topk"] == 512
    assert (written.vocab_size, written.max_model_len) == (2048, 16384)
    assert written.followers == ((2,) if written.name == "glm-5.2" else ())


@pytest.mark.slow
def test_stock_loaders_take_every_tensor_and_fill_every_parameter(written):
    """As many elements as the parameters have, none left NaN: so none is ignored or written twice.

    On SM90 classes of stock vLLM, the MTP draft's among them, on the CPU.
    """
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("stock_loader.py"), written.folder],
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert lines, done.stderr[-2000:]
    report = json.loads(lines[0].removeprefix("REPORT "))
    mtp, sizes = f"model.layers.{written.layers}.", Counter()
    for name, shape in expected_shapes(written.name).items():
        sizes["draft" if name.startswith(mtp) else "target"] += math.prod(shape)
    for kind, cls in (("target", "model.DeepseekV32ForCausalLM"), ("draft", "mtp.DeepseekV32MTP")):
        assert report[kind] == {
            "class": f"vllm.models.deepseek_v32.nvidia.{cls}",
            "elements": sizes[kind],
            "unfilled": [],
            "unloaded": [],
        }


@pytest.mark.slow
def test_log_probabilities_tell_errors_from_rounding(written):
    """HF's model: what 1% fewer keys do, against bf16 with an indexer rounded to fp8."""
    import torch
    import transformers
    from torch.utils._python_dispatch import TorchDispatchMode

    class Float32Products(TorchDispatchMode):
        """Products of bf16 as on a GPU, summed in float32; a CPU without them takes minutes."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            products = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
            if func in products and args[0].dtype == torch.bfloat16:
                return func(*(argument.float() for argument in args)).bfloat16()
            return func(*args, **(kwargs or {}))

    cls = getattr(transformers, written.architecture)
    draw = torch.Generator().manual_seed(7)
    lossy = []

    def lose(module, inputs, chosen):
        if not lossy:
            return chosen
        lost = torch.rand(chosen.shape, generator=draw) < lossy[0]
        return torch.where(lost, chosen[..., :1], chosen)

    def model(dtype):
        loaded = cls.from_pretrained(written.folder, dtype=dtype, attn_implementation="eager")
        for layer in loaded.model.layers:
            if indexer := layer.self_attn.indexer:
                indexer.register_forward_hook(lose)
        return loaded.eval()

    def log_probs(loaded, ids, loss=0.0):
        lossy[:] = [loss] if loss else []
        # Inference mode would show the mode whole linear layers, not their products.
        with torch.no_grad(), Float32Products():
            return loaded(ids, use_cache=False, logits_to_keep=32).logits[0].float().log_softmax(-1)

    exact, rounded = model(torch.float32), model(torch.bfloat16)
    for tokens in (120, 620):  # below and above index_topk
        ids = torch.randint(written.vocab_size, (1, tokens), generator=draw)
        reference = log_probs(exact, ids)
        assert 1 < reference.std(-1).mean() < 3
        noise = (log_probs(rounded, ids) - reference).abs().mean()
        one_percent = (log_probs(exact, ids, 0.01) - reference).abs().mean()
        half = (log_probs(exact, ids, 0.5) - reference).abs().mean()
        assert noise < 0.03
        assert one_percent > 1.8 * noise
        assert half > 20 * noise


def test_indexer_scores_keys_as_attention_does(toy, monkeypatch):
    """On leader and follower alike; dims rotated out of step with attention's would not."""
    import plain_model
    import torch

    from vllm_dcp_mla.rehearse import weights

    monkeypatch.setattr(weights, "INDEX_SHARED", 0.8)
    tensors = weights.random_weights(toy, 0)
    ids = torch.randint(128, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    seen = plain_model.last_row(toy, tensors, ids)
    assert len(seen) == toy["num_hidden_layers"]
    for scores, logits in seen:
        common = torch.stack((scores, logits.mean(0))).argsort(-1).argsort(-1).double()
        assert torch.corrcoef(common)[0, 1] > 0.6


def test_same_seed_same_weights(toy):
    from vllm_dcp_mla.rehearse.weights import random_weights

    first, again, other = (random_weights(toy, seed) for seed in (3, 3, 4))
    assert all(first[name].equal(again[name]) for name in first)
    assert not any(first[n].equal(other[n]) for n in first if "shared_head.norm" not in n)


def test_no_two_tensors_are_alike_but_those_that_are_meant_to_be(toy):
    from vllm_dcp_mla.rehearse.weights import random_weights

    weights, layers = random_weights(toy, 0), toy["num_hidden_layers"]
    alike = {
        frozenset((a, b))
        for a in weights
        for b in weights
        if a < b and weights[a].shape == weights[b].shape and weights[a].equal(weights[b])
    }
    mtp = f"model.layers.{layers}."
    expected = {
        frozenset(("model.embed_tokens.weight", f"{mtp}embed_tokens.weight")),
        frozenset(("lm_head.weight", f"{mtp}shared_head.head.weight")),
    }
    if layers == 3:  # a follower shares its leader's directions
        for name in ("q_a_proj", "kv_a_proj_with_mqa"):
            expected.add(frozenset(f"model.layers.{i}.self_attn.{name}.weight" for i in (1, 2)))
    assert alike == expected


def test_norms_are_near_one_and_not_one(toy):
    from vllm_dcp_mla.rehearse.weights import random_weights

    norms = [
        w
        for name, w in random_weights(toy, 0).items()
        if name.endswith("norm.weight") and "shared_head" not in name
    ]
    assert len(norms) >= 4 * toy["num_hidden_layers"]
    for norm in norms:
        assert 0.05 < (norm.float() - 1).square().mean().sqrt() < 0.2


def test_the_draft_is_one_token_whatever_its_hidden_state(toy):
    import torch

    from vllm_dcp_mla.rehearse.weights import random_weights
    from vllm_dcp_mla.rehearse.workload import FORCED_TOKEN

    weights, mtp = random_weights(toy, 0), f"model.layers.{toy['num_hidden_layers']}."
    hidden = torch.randn(50, toy["hidden_size"])
    hidden[:, 0] = hidden[:, 0].abs() + 0.1  # the constant channel
    normed = hidden * hidden.square().mean(-1, keepdim=True).rsqrt()
    normed = normed * weights[mtp + "shared_head.norm.weight"].float()
    for head in ("lm_head.weight", mtp + "shared_head.head.weight"):  # vLLM may share the first
        assert (normed @ weights[head].float().T).argmax(-1).unique().tolist() == [FORCED_TOKEN]


def test_correction_bias_lets_a_token_have_its_experts_from_its_groups(toy):
    from vllm_dcp_mla.rehearse.weights import random_weights

    layer = toy["num_hidden_layers"] - 1
    bias = random_weights(toy, 0)[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"]
    winners = bias > 1.5
    assert winners.sum() == toy["num_experts_per_tok"]
    assert winners.view(toy["n_group"], -1).any(1).sum() == toy["topk_group"]


def test_a_model_that_cannot_be_rehearsed_leaves_nothing_behind(tmp_path):
    from vllm_dcp_mla.rehearse.checkpoint import write_checkpoint

    with pytest.raises(ModelConfigError):
        write_checkpoint(str(tmp_path), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path, toy, monkeypatch):
    from vllm_dcp_mla.rehearse import checkpoint

    monkeypatch.setattr(checkpoint, "small_config", lambda *_, **__: toy)
    (tmp_path / "taken").write_text("")
    with pytest.raises(OSError, match="taken"):
        checkpoint.write_checkpoint("glm-5.2", tmp_path / "taken")
    (tmp_path / "out" / "model.safetensors").mkdir(parents=True)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        checkpoint.write_checkpoint("glm-5.2", tmp_path / "out")
