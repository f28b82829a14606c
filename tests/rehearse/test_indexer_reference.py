"""The float64 indexer against HF's, and against a plain one that shares nothing with it."""

import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import plain_model  # noqa: E402

from vllm_dcp_mla.rehearse.indexer_reference import indexer_of, load_indexer, recall  # noqa: E402

pytestmark = pytest.mark.vllm
TOKENS = 41
HF = {"glm-5.2": ("glm_moe_dsa", "GlmMoeDsa"), "deepseek-v3.2": ("deepseek_v32", "DeepseekV32")}


def own_tensors(config, layer=0):
    from vllm_dcp_mla.rehearse.weights import random_weights

    prefix = f"model.layers.{layer}.self_attn."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in random_weights(config, seed=3).items()
        if name.startswith(prefix)
    }


def hidden_states(config):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(TOKENS, config["hidden_size"], generator=generator, dtype=torch.float64)


def test_scores_are_a_plain_models(toy):
    tensors, hidden = own_tensors(toy), hidden_states(toy)
    indexer = indexer_of(toy, tensors)
    rows = torch.tensor([0, 7, TOKENS - 1])
    ours = indexer.scores(hidden, torch.arange(TOKENS), rows)
    double = {name: tensor.double() for name, tensor in tensors.items()}
    latent = plain_model.rms(
        hidden @ double["q_a_proj.weight"].T, double["q_a_layernorm.weight"], toy["rms_norm_eps"]
    )
    angles = torch.arange(TOKENS).double()[:, None] * plain_model.frequencies(toy)
    own = {f"self_attn.{name}": tensor for name, tensor in double.items()}
    plain = plain_model.index_scores(toy, own, hidden, latent, angles, indexer.neighbours)[rows]
    plain = plain.masked_fill(torch.arange(TOKENS) > rows[:, None], -math.inf)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    # Rows may be any, and in any order: a rank of PCP has some of them.
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1))
    moved = indexer.scores(hidden[order], order, torch.argsort(order)[rows])
    torch.testing.assert_close(moved[:, torch.argsort(order)], plain, rtol=1e-12, atol=1e-12)


def test_the_selection_is_hfs(toy):
    transformers = pytest.importorskip("transformers")
    import importlib

    folder, prefix = next(HF[name] for name in HF if HF[name][1] in toy["architectures"][0])
    try:
        module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    except ImportError:
        pytest.skip(f"Transformers {transformers.__version__} has no {folder}")
    hf_config = getattr(transformers, f"{prefix}Config")(**toy)
    tensors, hidden = own_tensors(toy), hidden_states(toy)
    indexer = indexer_of(toy, tensors)
    theirs = getattr(module, f"{prefix}Indexer")(hf_config, 0).double()
    theirs.load_state_dict(
        {
            name.removeprefix("indexer."): tensor.double()
            for name, tensor in tensors.items()
            if name.startswith("indexer.")
        }
    )
    embedding = getattr(module, f"{prefix}RotaryEmbedding")(hf_config)
    positions = torch.arange(TOKENS)[None]
    cos, sin = (t.double() for t in embedding(hidden[None].float(), positions))
    latent = plain_model.rms(
        hidden @ tensors["q_a_proj.weight"].double().T,
        tensors["q_a_layernorm.weight"].double(),
        toy["rms_norm_eps"],
    )
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None]
    theirs_chose = theirs(hidden[None], latent[None], (cos, sin), seen, positions)[0]
    ours = indexer.scores(hidden, positions[0], positions[0])
    for row in range(toy["index_topk"], TOKENS):
        assert recall(theirs_chose[row].tolist(), ours[row], toy["index_topk"]) == 1


@pytest.mark.parametrize("change", ["rope", "norm", "relu", "weights"])
def test_a_wrong_indexer_selects_others(toy, change, monkeypatch):
    indexer, hidden, topk = indexer_of(toy, own_tensors(toy)), hidden_states(toy), toy["index_topk"]
    positions = torch.arange(TOKENS)
    rows = positions[topk:]
    truth = indexer.scores(hidden, positions, rows)
    wrong = {
        "rope": replace(indexer, neighbours=not indexer.neighbours),
        "norm": replace(indexer, k_norm=torch.ones_like(indexer.k_norm), k_bias=-indexer.k_bias),
        "relu": indexer,
        "weights": replace(indexer, weights_proj=-indexer.weights_proj),
    }[change]
    if change == "relu":
        monkeypatch.setattr(torch.Tensor, "relu", lambda x: x)
    for scores, right in ((truth, True), (wrong.scores(hidden, positions, rows), False)):
        chosen = scores.topk(topk).indices.tolist()
        found = [recall(keys, row, topk) for keys, row in zip(chosen, truth, strict=True)]
        assert (min(found) == 1) == right, found


def test_recall():
    scores = torch.tensor([5.0, 1.0, 3.0, 3.0, 3.0, -math.inf])
    assert recall([0, 2], scores, 2) == recall([4, 0], scores, 2) == 1, "ties are anyone's"
    assert recall([0, 1], scores, 2) == 0.5
    assert recall([0, 0], scores, 2) == 0.5, "a key counts once"
    assert recall([0, -1], scores, 2) == recall([0, 5], scores, 2) == 0.5
    assert recall([0, 99], scores, 2) == 0.5
    assert recall([1, -1], torch.tensor([1.0, 5.0, 3.0]), 2) == 0.5, "-1 is not the last key"
    assert recall([0, 1, 2, 3, 4, -1], scores, 512) == 1, "fewer keys than topk"
    assert recall([0, 1, 2, 3], scores, 512) == 0.8


def test_a_written_checkpoints_indexer(written):
    indexer = load_indexer(written.folder, 1)
    assert (indexer.heads, indexer.wk.dtype) == (len(indexer.weights_proj), torch.float64)
    assert indexer.wq_b.shape == (indexer.heads * len(indexer.wk), len(indexer.q_a))
    assert not torch.equal(indexer.wk, load_indexer(written.folder, 0).wk)
    for follower in written.followers:
        with pytest.raises(KeyError, match=f"layer {follower} of .* has no indexer"):
            load_indexer(written.folder, follower)
