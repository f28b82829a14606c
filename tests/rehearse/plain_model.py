"""A DSA model in plain float64, from the tensors of a checkpoint by name.

Latent attention in its absorbed form, rope of neighbouring dims in attention and as the flag says
in the indexer, keys by rank of score. Nothing of Transformers or vLLM takes part.
"""

import math

import torch

from vllm_dcp_mla.rehearse.config import leader


def last_row(config, tensors, ids):
    """For each layer the last token's index scores ``[keys]`` and logits ``[heads, keys]``."""
    rows = []
    last_log_probs(config, tensors, ids, rows=rows)
    return rows


def last_log_probs(config, tensors, ids, *, interleaved=None, follow=True, select=True, rows=None):
    """``[vocab_size]`` float64, behind the last of ``ids``.

    Args:
        rows: a list, to which each layer appends what :func:`last_row` gives.
        interleaved: how the indexer rotates; the config's flag by default.
        follow: whether followers take the keys of their leader, not those of the first layer.
        select: whether keys are selected at all.
    """
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    eps, tokens = config["rms_norm_eps"], len(ids)
    if interleaved is None:
        interleaved = config.get("indexer_rope_interleave", False)
    angles = torch.arange(tokens).double()[:, None] * frequencies(config)
    future = torch.ones(tokens, tokens).triu(1).bool()
    x, chosen, scores = weights["model.embed_tokens.weight"][torch.tensor(ids)], {}, None
    for layer in range(config["num_hidden_layers"]):
        own = {
            name.removeprefix(f"model.layers.{layer}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        h = rms(x, own["input_layernorm.weight"], eps)
        q_latent = rms(
            h @ own["self_attn.q_a_proj.weight"].T, own["self_attn.q_a_layernorm.weight"], 1e-6
        )
        if leader(config, layer) == layer:
            scores = index_scores(config, own, h, q_latent, angles, interleaved)
            scores = scores.masked_fill(future, -math.inf)
            rank = scores.argsort(-1, descending=True).argsort(-1)
            chosen[layer] = ~future & ((rank < config["index_topk"]) | (not select))
        keys = chosen[leader(config, layer) if follow else 0]
        logits, latent, to_value = attention_logits(config, own, h, q_latent, angles)
        if rows is not None:
            rows.append((scores[-1], logits[-1]))
        x = x + attention(own, logits, latent, to_value, keys)
        x = x + mlp(config, own, rms(x, own["post_attention_layernorm.weight"], eps))
    x = rms(x[-1], weights["model.norm.weight"], eps)
    return (weights["lm_head.weight"] @ x).log_softmax(-1)


def attention_logits(config, own, h, q_latent, angles):
    heads, nope, rope, v_dim = (
        config[key]
        for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    latent, k_pe = (h @ own["self_attn.kv_a_proj_with_mqa.weight"].T).split(
        [config["kv_lora_rank"], rope], -1
    )
    latent = rms(latent, own["self_attn.kv_a_layernorm.weight"], 1e-6)
    k_pe = rotate(k_pe, angles, True)
    q = (q_latent @ own["self_attn.q_b_proj.weight"].T).view(len(h), heads, -1)
    q_pe = rotate(q[..., nope:], angles[:, None], True)
    to_key, to_value = (
        own["self_attn.kv_b_proj.weight"].view(heads, nope + v_dim, -1).split([nope, v_dim], 1)
    )
    absorbed = torch.einsum("thn,hnc->thc", q[..., :nope], to_key)
    logits = torch.einsum("thc,sc->ths", absorbed, latent)
    logits = (logits + torch.einsum("thr,sr->ths", q_pe, k_pe)) * softmax_scale(config)
    return logits, latent, to_value


def attention(own, logits, latent, to_value, keys):
    weights = logits.masked_fill(~keys[:, None], -math.inf).softmax(-1)
    out = torch.einsum("ths,sc,hvc->thv", weights, latent, to_value)
    return out.flatten(1) @ own["self_attn.o_proj.weight"].T


def index_scores(config, own, h, q_latent, angles, interleaved):
    heads, dim, rope = config["index_n_heads"], config["index_head_dim"], config["qk_rope_head_dim"]
    own = {name.removeprefix("self_attn.indexer."): tensor for name, tensor in own.items()}
    q = (q_latent @ own["wq_b.weight"].T).view(len(h), heads, dim)
    k = h @ own["wk.weight"].T
    k = k - k.mean(-1, keepdim=True)
    k = k / (k.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    k = k * own["k_norm.weight"] + own["k_norm.bias"]
    q = torch.cat((rotate(q[..., :rope], angles[:, None], interleaved), q[..., rope:]), -1)
    k = torch.cat((rotate(k[:, :rope], angles, interleaved), k[:, rope:]), -1)
    w = h @ own["weights_proj.weight"].T
    return torch.einsum("th,ths->ts", w, torch.einsum("thd,sd->ths", q, k).relu())


def mlp(config, own, h):
    if "mlp.gate_proj.weight" in own:
        return gated(own, "mlp.", h)
    scores = (h @ own["mlp.gate.weight"].T).sigmoid()
    biased = scores + own["mlp.gate.e_score_correction_bias"]
    groups = biased.view(len(h), config["n_group"], -1)
    best = groups.topk(2, -1).values.sum(-1).topk(config["topk_group"], -1).indices
    kept = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter(1, best, True)
    biased = groups.masked_fill(~kept[..., None], -math.inf).flatten(1)
    out = gated(own, "mlp.shared_experts.", h)
    for token, experts in enumerate(biased.topk(config["num_experts_per_tok"], -1).indices):
        weights = scores[token, experts]
        weights = weights / weights.sum() * config["routed_scaling_factor"]
        for expert, weight in zip(experts.tolist(), weights, strict=True):
            out[token] += weight * gated(own, f"mlp.experts.{expert}.", h[token])
    return out


def gated(own, prefix, h):
    gate, up = (h @ own[f"{prefix}{name}_proj.weight"].T for name in ("gate", "up"))
    return (torch.nn.functional.silu(gate) * up) @ own[f"{prefix}down_proj.weight"].T


def rms(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x, angles, neighbours):
    """``x [..., rope]`` by ``angles [..., rope / 2]``."""
    half = x.shape[-1] // 2
    a, b = (x[..., 0::2], x[..., 1::2]) if neighbours else (x[..., :half], x[..., half:])
    a, b = a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()
    return torch.stack((a, b), -1).flatten(-2) if neighbours else torch.cat((a, b), -1)


def frequencies(config):
    """``[rope / 2]``; YaRN (arXiv 2309.00071, section 3.2) blends slow ones with interpolated."""
    dim = config["qk_rope_head_dim"]
    yarn = config.get("rope_scaling")
    theta = config["rope_theta"] if yarn else config["rope_parameters"]["rope_theta"]
    plain = theta ** -(torch.arange(0, dim, 2).double() / dim)
    if not yarn:
        return plain
    original = yarn["original_max_position_embeddings"]
    low, high = (
        dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (yarn["beta_fast"], yarn["beta_slow"])
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    ramp = ((torch.arange(dim // 2).double() - low) / (high - low)).clamp(0, 1)
    return plain * (1 - ramp) + plain / yarn["factor"] * ramp


def softmax_scale(config):
    scale = (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5
    if yarn := config.get("rope_scaling"):
        scale *= (0.1 * yarn["mscale_all_dim"] * math.log(yarn["factor"]) + 1) ** 2
    return scale
