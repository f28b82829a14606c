"""Scores that are local and have a heavy tail, beside the plain ones."""

import re

import pytest

torch = pytest.importorskip("torch")

import plain_model  # noqa: E402

from vllm_dcp_mla.rehearse import weights  # noqa: E402
from vllm_dcp_mla.rehearse.config import small_config  # noqa: E402
from vllm_dcp_mla.rehearse.weights import random_weights  # noqa: E402

TOKENS, NEAR, QUERIES, TOPK = 1200, 60, 4, 512


def figures(config, scores):
    """Of the first layer's last queries: logits of near keys above others', attention on the best
    key, how logits go with the second channel, and attention on the selected keys.
    """
    made = (weights._HeavyWriter if scores == "heavy" else weights._Writer)(config, 0)
    own = {name: tensor.bfloat16().double() for name, tensor in made.layer(0).items()}
    ids = torch.randint(1, 2048, (TOKENS,), generator=torch.Generator().manual_seed(0))
    embedded = made.embedding().bfloat16().double()[ids]
    h = plain_model.rms(embedded, own["input_layernorm.weight"], config["rms_norm_eps"])
    latent = plain_model.rms(
        h @ own["self_attn.q_a_proj.weight"].T, own["self_attn.q_a_layernorm.weight"], 1e-6
    )
    angles = torch.arange(TOKENS).double()[:, None] * plain_model.frequencies(config)
    neighbours = config.get("indexer_rope_interleave", False)
    index = plain_model.index_scores(config, own, h, latent, angles, neighbours)[-QUERIES:]
    logits, *_ = plain_model.attention_logits(config, own, h, latent, angles)
    last = logits[-QUERIES:]  # which see nearly all keys
    mass = last.softmax(-1)
    selected = index.topk(TOPK, -1).indices[:, None].expand(-1, mass.shape[1], -1)
    return (
        (last[..., -NEAR:].mean() - last[..., :-NEAR].mean()).item(),
        mass.max(-1).values.mean().item(),
        torch.corrcoef(torch.stack((last.mean((0, 1)), embedded[:, 1])))[0, 1].item(),
        mass.gather(-1, selected).sum(-1).mean().item(),
    )


@pytest.mark.parametrize("model", ["glm-5.2", "deepseek-v3.2"])
def test_attention_is_near_and_on_few_keys_and_the_indexer_finds_them(model):
    config = small_config(model, index_topk=TOPK) | {"num_attention_heads": 8}
    plain, heavy = figures(config, "normal"), figures(config, "heavy")
    assert plain[0] < 0.5 < 1 < heavy[0]
    assert 2 * plain[1] < heavy[1]
    assert abs(plain[2]) < 0.15 < 0.5 < heavy[2]
    assert plain[3] < 0.97 < heavy[3]


def test_only_what_makes_scores_differs(toy):
    plain, heavy = random_weights(toy, 1), random_weights(toy, 1, "heavy")
    assert {n: t.shape for n, t in plain.items()} == {n: t.shape for n, t in heavy.items()}
    changed = {
        re.sub(r"^model\.(layers\.\d+\.)?", "", name)
        for name in plain
        if not torch.equal(plain[name], heavy[name])
    }
    assert changed == {
        "embed_tokens.weight",
        "self_attn.q_a_proj.weight",
        "self_attn.q_b_proj.weight",
        "self_attn.kv_a_proj_with_mqa.weight",
        "self_attn.indexer.wk.weight",
        "self_attn.indexer.wq_b.weight",
    }
    channel = heavy["model.embed_tokens.weight"][:, 1].float()
    assert 2 < channel.abs().max() <= 8
    assert channel.abs().median() < 1
    same = [0, *range(2, toy["hidden_size"])]
    assert torch.equal(
        heavy["model.embed_tokens.weight"][:, same], plain["model.embed_tokens.weight"][:, same]
    )
