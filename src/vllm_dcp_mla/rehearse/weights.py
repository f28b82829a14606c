"""Random weights under which log-probabilities tell attention errors from rounding.

Independent normal weights would not do. Attention over keys that no head prefers is an average, and
an indexer that knows nothing of attention drops and adds keys that matter as much as any other: a
rounding error that swaps 1% of the keys then moves the output by 14%. Here, as after training,

* all heads share a part of their queries and keys, so that some keys matter to all of them;
* the indexer scores keys by that part, so that keys near its threshold carry little weight;
* a follower shares the directions of its leader;
* one channel of the residual stream is a constant that nothing writes, so that the index weights,
  which are linear in the hidden state, stay positive;
* the correction bias decides between experts, so that rounding never swaps one.

Two distributions of scores over keys: ``normal``, where keys that matter are anywhere, and
``heavy``, as after training: near keys matter more, and a few tokens matter to every query. A
second channel of the embedding, heavy-tailed over tokens, says how much; queries have a constant
part that looks for it and, in the rope dims, one that looks for near keys.

The MTP layer drafts one token always, whatever its attention gives: a draft changes no output, and
so can be compared with an engine that drafts nothing. What that layer computes is not compared.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import torch

from .config import Scores, count, leader, rope
from .workload import FORCED_TOKEN

#: Standard deviation of attention logits over keys: the part all heads share, and a head's own.
SHARED_LOGITS, OWN_LOGITS = 1.75, 1.0
#: Share of an index head's query that is the heads' common one; squares add up to 1.
INDEX_SHARED = 0.8
#: Root mean square that an attention over one key, and an MLP, add to a residual stream of 1.
ATTENTION_GAIN, MLP_GAIN = 2.0, 0.4
#: Standard deviation of the logits.
LOGITS = 2.0
#: The constant channel 0 of the embedding; the others are standard normal.
ANCHOR = 4.0
#: Under ``heavy``: the constant part of queries and keys in each rotated pair of dims, by which the
#: logits of the nearest keys are about 5 above those of keys 500 tokens away (GLM-5.2), and what a
#: unit of a token's second channel adds to its logits.
LOCALITY, SALIENCE = 1.5, 1.5
#: The second channel: a t distribution of so many degrees of freedom, its scale, its largest value,
#: and how much more than others that channel says of a token's key.
_TAIL, _BODY, _LARGEST, _SALIENT_GAIN = 2, 0.5, 8.0, 4.0
#: Root mean square of silu(g) * u for independent standard normal g and u.
_SILU = 0.6

Tensors = dict[str, torch.Tensor]


def random_weights(config: dict[str, Any], seed: int, scores: Scores = "normal") -> Tensors:
    """All tensors of the checkpoint by their released names, bf16 (correction bias fp32).

    Args:
        config: its ``config.json``.
        seed: of all draws.
        scores: how attention logits and index scores are distributed over keys.
    """
    return (_HeavyWriter if scores == "heavy" else _Writer)(config, seed).all()


@dataclass(slots=True)
class Shared:
    """What all heads have of a leader and its followers.

    Attributes:
        q_a: ``[q_lora_rank, hidden]``, to the query latent.
        to_latent: ``[kv_lora_rank, hidden]``.
        to_rope: ``[rope, hidden]``, the keys' rotated dims.
        q: ``[seen + rope, q_lora_rank]``, query rows of the seen dims, then of the rotated ones.
        k: ``[seen, kv_lora_rank]``, latent to the seen dims of keys.
    """

    q_a: torch.Tensor
    to_latent: torch.Tensor
    to_rope: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor


class _Writer:
    """Makes tensors; each has a generator of its own, so that none depends on another's shape."""

    def __init__(self, config: dict[str, Any], seed: int) -> None:
        self.config = config
        self.seed = seed
        self.hidden: int = config["hidden_size"]
        self.rope: int = config["qk_rope_head_dim"]
        self.nope: int = config["qk_nope_head_dim"]
        # Dims of a query that all heads share beside the rope dims: as many as an indexer can see.
        self.seen = min(self.nope, config["index_head_dim"] - self.rope)

    def all(self) -> Tensors:
        config, layers = self.config, self.config["num_hidden_layers"]
        embedding = self.embedding()
        head = self.linear("head", config["vocab_size"], self.hidden, LOGITS)
        head[FORCED_TOKEN, 0] = 2 * head[:, 0].abs().max()
        tensors = {
            "model.embed_tokens.weight": embedding,
            "model.norm.weight": self.norm("norm", self.hidden),
            "lm_head.weight": head,
        }
        for layer in range(layers + 1):
            prefix = f"model.layers.{layer}."
            for name, tensor in (self.layer(layer) | self.mlp(layer)).items():
                tensors[prefix + name] = tensor
        prefix = f"model.layers.{layers}."
        join = self.linear("eh_proj", self.hidden, 2 * self.hidden)
        join[0] = 0
        join[0, 0] = 1  # the constant of the token's embedding stays the constant
        tensors |= {
            prefix + "embed_tokens.weight": embedding.clone(),
            prefix + "enorm.weight": self.norm("enorm", self.hidden),
            prefix + "hnorm.weight": self.norm("hnorm", self.hidden),
            prefix + "eh_proj.weight": join,
            # Of the draft's hidden state the constant alone is left: every draft is one token.
            prefix + "shared_head.norm.weight": torch.eye(1, self.hidden).flatten(),
            prefix + "shared_head.head.weight": head.clone(),
        }
        return {
            name: tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()
            for name, tensor in tensors.items()
        }

    def embedding(self) -> torch.Tensor:
        """``[vocab_size, hidden]``."""
        embedding = self.normal("embedding", self.config["vocab_size"], self.hidden)
        embedding[:, 0] = ANCHOR
        return embedding

    def shared(self, group: str) -> Shared:
        """What the attention of a leader and of its followers has in common."""
        q_rank, kv_rank = self.config["q_lora_rank"], self.config["kv_lora_rank"]
        return Shared(
            q_a=self.linear(group + "q_a", q_rank, self.hidden),
            to_latent=self.linear(group + "kv_a", kv_rank, self.hidden),
            to_rope=self.linear(group + "k_pe", self.rope, self.hidden),
            q=self.linear(group + "q", self.seen + self.rope, q_rank),
            k=self.linear(group + "k", self.seen, kv_rank),
        )

    def layer(self, layer: int) -> Tensors:
        """Norms, attention and, on a leader, the indexer of a layer."""
        config, own, group = self.config, f"{layer}.", f"group {leader(self.config, layer)}."
        heads, q_rank, kv_rank = (
            config[key] for key in ("num_attention_heads", "q_lora_rank", "kv_lora_rank")
        )
        v_dim, seen, nope = config["v_head_dim"], self.seen, self.nope
        shared = self.shared(group)

        q = self.linear(own + "q_b", heads * (nope + self.rope), q_rank).view(heads, -1, q_rank)
        q *= self.gain(OWN_LOGITS, nope - seen)
        shared_gain = self.gain(SHARED_LOGITS, seen + self.rope)
        q[:, :seen], q[:, nope:] = shared.q[:seen] * shared_gain, shared.q[seen:] * shared_gain
        kv = self.linear(own + "kv_b", heads * (nope + v_dim), kv_rank).view(heads, -1, kv_rank)
        kv[:, :seen] = shared.k
        tensors = {
            "input_layernorm.weight": self.norm(own + "input", self.hidden),
            "post_attention_layernorm.weight": self.norm(own + "post", self.hidden),
            "self_attn.q_a_proj.weight": shared.q_a,
            "self_attn.q_a_layernorm.weight": self.norm(own + "q_a", q_rank),
            "self_attn.q_b_proj.weight": q.flatten(0, 1),
            "self_attn.kv_a_proj_with_mqa.weight": torch.cat((shared.to_latent, shared.to_rope)),
            "self_attn.kv_a_layernorm.weight": self.norm(own + "kv_a", kv_rank),
            "self_attn.kv_b_proj.weight": kv.flatten(0, 1),
            "self_attn.o_proj.weight": self.output(own + "o", heads * v_dim, ATTENTION_GAIN),
        }
        if leader(config, layer) == layer:
            key = torch.cat((shared.to_rope, shared.k @ shared.to_latent))
            query = torch.cat((shared.q[seen:], shared.q[:seen]))
            for name, tensor in self.indexer(own, key, query).items():
                tensors[f"self_attn.indexer.{name}"] = tensor
        return tensors

    def indexer(self, own: str, key: torch.Tensor, query: torch.Tensor) -> Tensors:
        """An indexer that looks for the keys that the shared part of attention looks for.

        Args:
            own: names the layer.
            key: ``[rope + seen, hidden]``, the shared key rows, rope dims first.
            query: ``[rope + seen, q_lora_rank]``, the shared query rows, rope dims first.
        """
        heads, dim = self.config["index_n_heads"], self.config["index_head_dim"]
        if not self.config.get("indexer_rope_interleave", False):
            # Attention rotates dims 2i and 2i + 1 as a pair, this indexer dims i and i + rope / 2.
            pairs = torch.arange(self.rope).view(-1, 2).T.flatten()
            order = torch.cat((pairs, torch.arange(self.rope, len(key))))
            key, query = key[order], query[order]
        wk = self.linear(own + "wk", dim, self.hidden)
        wk[: len(key)] = key
        wq = self.linear(own + "wq_b", heads * dim, query.shape[1]).view(heads, dim, -1)
        wq *= math.sqrt(1 - INDEX_SHARED**2)
        wq[:, : len(query)] += query * INDEX_SHARED
        weights = self.linear(own + "weights_proj", heads, self.hidden, 0.2)
        weights[:, 0] = 1 / ANCHOR
        return {
            "wk.weight": wk,
            "wq_b.weight": wq.flatten(0, 1),
            "weights_proj.weight": weights,
            "k_norm.weight": self.norm(own + "k_norm", dim),
            "k_norm.bias": self.normal(own + "k_norm.bias", dim) * 0.1,
        }

    def mlp(self, layer: int) -> Tensors:
        """A dense MLP, or experts and their router from ``first_k_dense_replace`` on."""
        config, own = self.config, f"{layer}.mlp."
        if layer < config["first_k_dense_replace"]:
            return self.gated("mlp.", own, config["intermediate_size"])
        experts, width = config["n_routed_experts"], config["moe_intermediate_size"]
        tensors = {
            "mlp.gate.weight": self.linear(own + "gate", experts, self.hidden),
            "mlp.gate.e_score_correction_bias": self.bias(own),
        }
        for expert in range(experts):
            tensors |= self.gated(f"mlp.experts.{expert}.", f"{own}{expert}.", width)
        shared = width * config["n_shared_experts"]
        return tensors | self.gated("mlp.shared_experts.", own + "shared.", shared)

    def bias(self, own: str) -> torch.Tensor:
        """``[experts]`` fp32: as many as a token gets, in the groups it may use, stand out by 2.

        Scores are below 1, so that the same experts always win; their weights differ by token.
        """
        config = self.config
        groups, kept = count(config, "n_group"), count(config, "topk_group")
        draw = torch.rand(config["n_routed_experts"], generator=self.generator(own + "bias"))
        bias = draw.view(groups, -1) * 0.1
        eligible = torch.full_like(bias, -math.inf)
        chosen = bias.sum(1).topk(kept).indices
        eligible[chosen] = bias[chosen]
        winners = eligible.flatten().topk(config["num_experts_per_tok"]).indices
        bias = bias.flatten().clone()
        bias[winners] += 2
        return bias

    def gated(self, prefix: str, own: str, width: int) -> Tensors:
        return {
            f"{prefix}gate_proj.weight": self.linear(own + "gate_proj", width, self.hidden),
            f"{prefix}up_proj.weight": self.linear(own + "up_proj", width, self.hidden),
            f"{prefix}down_proj.weight": self.output(own + "down", width, MLP_GAIN / _SILU),
        }

    def gain(self, logits: float, dims: int) -> float:
        """Scale of query rows for logits of that deviation from ``dims`` dims of keys of unit size.

        The softmax scale is ``qk_head_dim ** -0.5``, times YaRN's ``mscale`` squared.
        """
        scale = (self.nope + self.rope) ** -0.5
        factor, mscale = (rope(self.config).get(key) for key in ("factor", "mscale_all_dim"))
        if factor and factor > 1 and mscale:
            scale *= (0.1 * mscale * math.log(factor) + 1) ** 2
        return logits / (scale * math.sqrt(max(dims, 1)))

    def output(self, name: str, fan_in: int, gain: float) -> torch.Tensor:
        """A projection into the residual stream; it leaves the constant channel alone."""
        weight = self.linear(name, self.hidden, fan_in, gain)
        weight[0] = 0
        return weight

    def linear(self, name: str, rows: int, fan_in: int, gain: float = 1.0) -> torch.Tensor:
        """``[rows, fan_in]``: from inputs of unit size, outputs of size ``gain``."""
        return self.normal(name, rows, fan_in) * (gain / math.sqrt(fan_in))

    def norm(self, name: str, dim: int) -> torch.Tensor:
        """Near 1, but a norm whose weight is dropped shows."""
        return 1 + 0.1 * self.normal(name + " norm", dim)

    def normal(self, name: str, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator(name))

    def generator(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


class _HeavyWriter(_Writer):
    """Scores that decay with distance and have a heavy tail over tokens."""

    def embedding(self) -> torch.Tensor:
        """``[vocab_size, hidden]``; channel 1 has a heavy tail."""
        embedding = super().embedding()
        normal = embedding[:, 1].clone()
        squares = self.normal("tail", len(normal), _TAIL).square().sum(1)
        tail = normal * (_TAIL / squares).sqrt()
        embedding[:, 1] = (_BODY * tail).clamp(-_LARGEST, _LARGEST)
        return embedding

    def shared(self, group: str) -> Shared:
        """As of all models, with constant parts of queries and keys."""
        shared = super().shared(group)
        shared.q_a[0] = 0
        shared.q_a[0, 0] = 1  # the first dim of the query latent is the constant
        turned = torch.arange(self.rope) % 2 == 0  # the first dim of each pair
        shared.to_rope[turned, 0] = LOCALITY / ANCHOR
        shared.to_rope[~turned, 0] = 0
        shared.q[self.seen :][turned, 0] = LOCALITY / ANCHOR
        shared.q[self.seen :][~turned, 0] = 0
        shared.to_latent[:, 1] *= _SALIENT_GAIN
        salient = shared.k @ shared.to_latent[:, 1]
        scale = math.sqrt(self.seen + self.rope) / (SHARED_LOGITS * salient.square().sum())
        shared.q[: self.seen, 0] = salient * (SALIENCE * scale / ANCHOR)
        return shared
