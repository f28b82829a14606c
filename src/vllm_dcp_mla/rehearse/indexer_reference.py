"""The indexer in float64: which keys each query should select, from a layer's hidden states.

The score of a key ``s`` for a query ``t`` is ``sum_h w[t, h] relu(q[t, h] . k[s])`` (DeepSeek-V3.2
technical report, section 2.1), with queries from the query latent, keys from the hidden states
through a LayerNorm, and rope on the first dims of both. Positive factors of all scores of a query,
such as vLLM's ``head_dim ** -0.5 * heads ** -0.5``, change no selection and are left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .config import rope

_K_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Indexer:
    """One layer's indexer; tensors in the dtype that all of it is computed in.

    Attributes:
        q_a: ``[q_lora_rank, hidden]``, to the query latent.
        q_a_norm: ``[q_lora_rank]``, of the latent's RMS norm.
        wq_b: ``[heads * dim, q_lora_rank]``.
        wk: ``[dim, hidden]``.
        weights_proj: ``[heads, hidden]``.
        k_norm, k_bias: ``[dim]``, of the keys' LayerNorm.
        frequencies: ``[rope / 2]``, radians a position.
        heads: index heads.
        eps: of the latent's norm.
        neighbours: rope pairs dims ``2i, 2i + 1``, else ``i, i + rope / 2``.
    """

    q_a: torch.Tensor
    q_a_norm: torch.Tensor
    wq_b: torch.Tensor
    wk: torch.Tensor
    weights_proj: torch.Tensor
    k_norm: torch.Tensor
    k_bias: torch.Tensor
    frequencies: torch.Tensor
    heads: int
    eps: float
    neighbours: bool

    def queries(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotated queries ``[T, heads, dim]`` of hidden states ``[T, hidden]`` at positions."""
        latent = hidden.to(self.q_a) @ self.q_a.T
        latent = latent * (latent.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        q = (latent * self.q_a_norm) @ self.wq_b.T
        return self._rotate(q.view(len(hidden), self.heads, -1), positions[:, None])

    def keys(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotated keys ``[S, dim]`` of hidden states ``[S, hidden]`` at positions ``[S]``."""
        k = torch.nn.functional.layer_norm(
            hidden.to(self.wk) @ self.wk.T,
            (len(self.wk),),
            self.k_norm,
            self.k_bias,
            _K_NORM_EPS,
        )
        return self._rotate(k, positions)

    def scores(
        self, hidden: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Scores ``[R, S]`` of all keys for some queries; -inf where a key is behind its query.

        Args:
            hidden: ``[S, hidden]``, the layer's input behind its norm.
            positions: ``[S]`` of them.
            rows: ``[R]``, the queries, as indices into ``hidden``.
        """
        q = self.queries(hidden[rows], positions[rows])
        weights = hidden[rows].to(self.weights_proj) @ self.weights_proj.T
        k = self.keys(hidden, positions)
        found = torch.stack(  # a query at a time: [R, heads, S] would be large
            [weight @ (query @ k.T).relu() for query, weight in zip(q, weights, strict=True)]
        )
        return found.masked_fill(positions > positions[rows][:, None], -math.inf)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``x [..., dim]``, its first dims turned by ``positions`` times the frequencies."""
        half = len(self.frequencies)
        turned = x[..., : 2 * half]
        if self.neighbours:
            a, b = turned[..., 0::2], turned[..., 1::2]
        else:
            a, b = turned[..., :half], turned[..., half:]
        angles = positions[..., None].to(self.frequencies) * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        a, b = a * cos - b * sin, b * cos + a * sin
        pairs = torch.stack((a, b), -1) if self.neighbours else torch.stack((a, b), -2)
        return torch.cat((pairs.flatten(-2), x[..., 2 * half :]), -1)


def load_indexer(folder: str | Path, layer: int, dtype: torch.dtype = torch.float64) -> Indexer:
    """The indexer of a leader layer, from a checkpoint of :func:`.checkpoint.write_checkpoint`.

    Raises:
        KeyError: the layer has none.
        OSError: no checkpoint.
    """
    from safetensors import safe_open

    from .checkpoint import CONFIG, WEIGHTS

    config = json.loads((Path(folder) / CONFIG).read_text())
    prefix = f"model.layers.{layer}.self_attn."
    with safe_open(Path(folder) / WEIGHTS, "pt") as file:
        names = set(file.keys())
        if f"{prefix}indexer.wk.weight" not in names:
            raise KeyError(f"layer {layer} of {folder} has no indexer: it follows another layer.")
        tensors = {
            name: file.get_tensor(prefix + name)
            for name in (
                "q_a_proj.weight",
                "q_a_layernorm.weight",
                *(
                    f"indexer.{part}"
                    for part in (
                        "wq_b.weight",
                        "wk.weight",
                        "weights_proj.weight",
                        "k_norm.weight",
                        "k_norm.bias",
                    )
                ),
            )
        }
    return indexer_of(config, tensors, dtype)


def indexer_of(
    config: dict[str, Any], tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.float64
) -> Indexer:
    """An indexer from tensors by their released names, without ``model.layers.N.self_attn.``."""
    q_a, q_a_norm, wq_b, wk, weights_proj, k_norm, k_bias = (
        tensors[name].to(dtype)
        for name in (
            "q_a_proj.weight",
            "q_a_layernorm.weight",
            "indexer.wq_b.weight",
            "indexer.wk.weight",
            "indexer.weights_proj.weight",
            "indexer.k_norm.weight",
            "indexer.k_norm.bias",
        )
    )
    return Indexer(
        q_a,
        q_a_norm,
        wq_b,
        wk,
        weights_proj,
        k_norm,
        k_bias,
        frequencies(config).to(dtype),
        config["index_n_heads"],
        config["rms_norm_eps"],
        bool(config.get("indexer_rope_interleave", False)),
    )


def frequencies(config: dict[str, Any]) -> torch.Tensor:
    """Radians a position of each pair of dims, ``[rope / 2]`` float64.

    YaRN (arXiv 2309.00071, section 3.2) keeps fast frequencies, divides slow ones by its factor and
    blends between.
    """
    dim, scaling = config["qk_rope_head_dim"], rope(config)
    theta = float(scaling.get("rope_theta") or config["rope_theta"])
    plain = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    factor = scaling.get("factor", 1)
    if factor == 1:
        return plain
    original = scaling["original_max_position_embeddings"]

    def pair(turns: float) -> float:
        """The pair that turns so often within the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair(scaling["beta_fast"])), 0)
    high = min(math.ceil(pair(scaling["beta_slow"])), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return plain * (1 - ramp) + plain / factor * ramp


def recall(selected: Iterable[int], scores: torch.Tensor, topk: int) -> float:
    """Share of the best keys that were selected.

    Keys with the score of the last of the best are as good as it: which of them are selected is
    anyone's choice.

    Args:
        selected: positions, -1 for none, in any order; one that occurs twice counts once.
        scores: ``[S]`` of one query, -inf where a key is behind it.
        topk: keys that it selects at most.
    """
    wanted = min(topk, int((scores > -math.inf).sum()))
    threshold = scores.topk(wanted).values[-1]
    chosen = torch.tensor(
        sorted({position for position in selected if 0 <= position < len(scores)}), dtype=torch.long
    )
    return int((scores[chosen] >= threshold).sum()) / wanted
