"""A small random checkpoint with the attention dims and flags of a released DSA model.

Attention, indexer and head dims, rope, routing and index sharing are the released model's. Layers,
hidden and MLP sizes, experts and vocabulary are small, and nothing is quantised.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ..models import BUILT_IN
from .config import MAX_MODEL_LEN, Scores, followers, small_config

CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True, slots=True)
class RehearsalModel:
    """A checkpoint that :func:`write_checkpoint` wrote.

    Attributes:
        name: the model it stands for: a bundled name, or the folder's.
        folder: where ``config.json`` and ``model.safetensors`` are.
        architecture: the class that serves it.
        layers: decoder layers, without the one MTP layer behind them. The last is the MoE layer.
        followers: layers that take their keys from the nearest indexer before them.
        index_topk: keys a token selects at most.
        vocab_size: token ids are below it.
        max_model_len: the longest context that its rope table has rows for.
        key_elements: of a token's row of a layer's KV cache.
        index_head_dim: of the indexer's keys.
    """

    name: str
    folder: Path
    architecture: str
    layers: int
    followers: tuple[int, ...]
    index_topk: int
    vocab_size: int
    max_model_len: int
    key_elements: int
    index_head_dim: int

    def cache_bytes(self, kv_cache_dtype: str) -> int:
        """KV and index cache of a token over all layers, an upper estimate (every layer leads)."""
        return (self.layers + 1) * (self._key_bytes(kv_cache_dtype) + self._index_bytes)

    def cache_bytes_without_drafter(self, kv_cache_dtype: str) -> int:
        """The same to the byte, where no MTP layer runs: followers have no index cache."""
        leaders = self.layers - len(self.followers)
        return self.layers * self._key_bytes(kv_cache_dtype) + leaders * self._index_bytes

    def _key_bytes(self, kv_cache_dtype: str) -> int:
        return self.key_elements * (1 if "fp8" in kv_cache_dtype else 2)

    @property
    def _index_bytes(self) -> int:
        return self.index_head_dim + 4  # an fp8 key and its float32 scale


def write_checkpoint(
    model: str,
    folder: Path,
    *,
    index_topk: int | None = None,
    max_model_len: int = MAX_MODEL_LEN,
    seed: int = 0,
    scores: Scores = "normal",
) -> RehearsalModel:
    """Writes ``config.json`` and ``model.safetensors`` into a folder.

    GLM-5.2 takes 0.73 GB in bf16, DeepSeek-V3.2 0.65 GB: most of it is ``q_b_proj`` and
    ``kv_b_proj``, whose sizes follow from heads and ranks.

    Args:
        model: a bundled name, or a folder with the ``config.json`` of a DSA model.
        folder: made if it is not there; files of these two names are replaced.
        index_topk: keys a token selects, instead of the model's: 512, 1024 or 2048.
        max_model_len: longest context in tokens.
        seed: of the weights; the same seed gives the same weights.
        scores: how scores are distributed over keys; see :mod:`.weights`.

    Raises:
        ModelConfigError: the model cannot be read, lacks a dim, or selects another number of keys.
        UnservedModelError: no DSA model that vLLM's ``models/deepseek_v32`` serves.
        OSError: the folder cannot be written.
    """
    config = small_config(model, index_topk=index_topk, max_model_len=max_model_len)
    from safetensors import SafetensorError  # after the check of the model, which needs no torch
    from safetensors.torch import save_file

    from .weights import random_weights

    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    try:
        save_file(random_weights(config, seed, scores), folder / WEIGHTS, {"format": "pt"})
    except SafetensorError as error:  # a full disk, say
        raise OSError(f"{folder / WEIGHTS} cannot be written: {error}") from None
    return RehearsalModel(
        name=model if model in BUILT_IN else Path(model).resolve().name,
        folder=folder,
        architecture=config["architectures"][0],
        layers=config["num_hidden_layers"],
        followers=followers(config),
        index_topk=config["index_topk"],
        vocab_size=config["vocab_size"],
        max_model_len=min(max_model_len, config["max_position_embeddings"]),
        key_elements=config["kv_lora_rank"] + config["qk_rope_head_dim"],
        index_head_dim=config["index_head_dim"],
    )
