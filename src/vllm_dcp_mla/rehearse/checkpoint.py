"""A small random checkpoint with the attention dims and flags of a released DSA model.

Attention, indexer and head dims, rope, routing and index sharing are the released model's. Layers,
hidden and MLP sizes, experts and vocabulary are small, and nothing is quantised.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..models import BUILT_IN, ModelConfigError, UnservedModelError, load_config

#: What vLLM's ``models/deepseek_v32`` serves.
ARCHITECTURES = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")

#: Widths for which vLLM has the kernel that merges top-k candidates of DCP ranks.
INDEX_TOPK = (512, 1024, 2048)

HIDDEN_SIZE = 1024
INTERMEDIATE_SIZE = 1024
MOE_INTERMEDIATE_SIZE = 512
VOCAB_SIZE = 2048
MAX_MODEL_LEN = 16384

#: Counts that the tensors are shaped by, beside those that ``load_config`` asks for.
_COUNTS = ("q_lora_rank", "v_head_dim", "index_n_heads", "index_head_dim", "num_experts_per_tok")

#: Left out: quantisation, code of others, token ids of another vocabulary, lists of other lengths.
_DROPPED = (
    "quantization_config",
    "auto_map",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "mlp_layer_types",
    "layer_types",
    "transformers_version",
)


@dataclass(frozen=True, slots=True)
class RehearsalModel:
    """A checkpoint that :func:`write_checkpoint` wrote.

    Attributes:
        name: the model it stands for: a bundled name, or the folder's.
        folder: where ``config.json`` and ``model.safetensors`` are.
        architecture: the class that serves it.
        layers: decoder layers, without the one MTP layer behind them. The last is the MoE layer.
        followers: layers that take their keys from the nearest indexer before them.
        heads: query heads, before tensor parallelism.
        index_topk: keys a token selects at most.
        vocab_size: token ids are below it.
        max_model_len: positions that the rope table has.
        key_elements: of a token's row of a layer's KV cache.
        index_head_dim: of the indexer's keys.
    """

    name: str
    folder: Path
    architecture: str
    layers: int
    followers: tuple[int, ...]
    heads: int
    index_topk: int
    vocab_size: int
    max_model_len: int
    key_elements: int
    index_head_dim: int

    def cache_bytes(self, kv_cache_dtype: str) -> int:
        """KV and index cache of a token over all layers, an upper estimate (every layer leads)."""
        element = 1 if "fp8" in kv_cache_dtype else 2
        # The indexer's cache: an fp8 key and its float32 scale.
        return (self.layers + 1) * (self.key_elements * element + self.index_head_dim + 4)


def write_checkpoint(
    model: str, folder: Path, *, index_topk: int | None = None, seed: int = 0
) -> RehearsalModel:
    """Writes ``config.json`` and ``model.safetensors`` (0.5 to 0.7 GB, bf16) into a folder.

    Args:
        model: a bundled name, or a folder with the ``config.json`` of a DSA model.
        folder: made if it is not there; files of these two names are replaced.
        index_topk: keys a token selects, instead of the model's: one of :data:`INDEX_TOPK`.
        seed: of the weights; the same seed gives the same file.

    Raises:
        ModelConfigError: the model cannot be read, lacks a dim, or selects another number of keys.
        UnservedModelError: no DSA model that vLLM's ``models/deepseek_v32`` serves.
        OSError: the folder cannot be written.
    """
    config = small_config(model, index_topk=index_topk)
    from safetensors.torch import save_file  # here, because the lines above need no torch

    from .weights import followers, random_weights

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(random_weights(config, seed), folder / "model.safetensors", {"format": "pt"})
    return RehearsalModel(
        name=model if model in BUILT_IN else Path(model).resolve().name,
        folder=folder,
        architecture=config["architectures"][0],
        layers=config["num_hidden_layers"],
        followers=followers(config),
        heads=config["num_attention_heads"],
        index_topk=config["index_topk"],
        vocab_size=config["vocab_size"],
        max_model_len=min(MAX_MODEL_LEN, config["max_position_embeddings"]),
        key_elements=config["kv_lora_rank"] + config["qk_rope_head_dim"],
        index_head_dim=config["index_head_dim"],
    )


def small_config(model: str, *, index_topk: int | None = None) -> dict[str, Any]:
    """The ``config.json`` of the small model; raises as :func:`write_checkpoint` does."""
    released = load_config(model)
    _check(model, released)
    config = {key: value for key, value in released.items() if key not in _DROPPED}
    config["index_topk"] = _topk(model, released["index_topk"], index_topk)
    config |= {
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "moe_intermediate_size": MOE_INTERMEDIATE_SIZE,
        "vocab_size": VOCAB_SIZE,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 1,
        "num_key_value_heads": released["num_attention_heads"],
    }
    # What every release of these models says; vLLM has other defaults, Transformers these.
    config.setdefault("topk_method", "noaux_tc")
    config.setdefault("scoring_func", "sigmoid")
    config.setdefault("n_shared_experts", 1)
    if "rope_scaling" not in config:  # a table of a million rows, which nothing here reaches
        config["max_position_embeddings"] = min(
            MAX_MODEL_LEN, config.get("max_position_embeddings", MAX_MODEL_LEN)
        )
    _fit_layers(config)
    _fit_experts(config)
    return config


def _fit_layers(config: dict[str, Any]) -> None:
    """Two dense leaders and a follower where the model shares indices, else two layers."""
    freq, pattern = config.get("index_topk_freq", 1), config.get("index_topk_pattern")
    shares = "S" in pattern if pattern else freq > 1
    # Two leaders, so that a follower that reads the first one's keys is seen.
    config["num_hidden_layers"] = layers = 3 if shares else 2
    config["first_k_dense_replace"] = layers - 1
    config["moe_layer_freq"] = 1
    if pattern:
        config["index_topk_pattern"] = "FFS" if shares else "FF"
    elif shares:
        config["index_skip_topk_offset"] = 2  # layers 0 and 1 lead, whatever the frequency
    if "indexer_types" in config:
        config["indexer_types"] = ["full", "full", *(["shared"] if shares else [])]


def _fit_experts(config: dict[str, Any]) -> None:
    """At least twice the experts of a token, and of a group, which is judged by its best two."""
    groups, chosen = config.get("n_group") or 1, config["num_experts_per_tok"]
    kept = config.get("topk_group") or 1
    config["n_routed_experts"] = groups * max(2, -(-2 * chosen // groups), -(-chosen // kept))


def _topk(model: str, released: int, wanted: int | None) -> int:
    topk = released if wanted is None else wanted
    if topk not in INDEX_TOPK:
        says = f"--model {model!r} selects" if wanted is None else "--index-topk asks for"
        raise ModelConfigError(
            f"{says} {topk} keys; vLLM merges the candidates of DCP ranks for "
            f"{', '.join(map(str, INDEX_TOPK))} only; give --index-topk one of these."
        )
    return topk


def _check(model: str, config: dict[str, Any]) -> None:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not set(architectures) & set(ARCHITECTURES):
        raise UnservedModelError(
            f"--model {model!r} is {architectures}; a rehearsal needs one of "
            f"{', '.join(ARCHITECTURES)} under architectures in its config.json."
        )
    missing = [key for key in _COUNTS if type(config.get(key)) is not int or config[key] < 1]
    if missing:
        raise ModelConfigError(
            f"--model {model!r} has no usable {', '.join(missing)} in its config.json; "
            "give the released model's."
        )
    rope, index_dim = config["qk_rope_head_dim"], config["index_head_dim"]
    if rope < 2 or rope % 2 or index_dim < rope:
        raise ModelConfigError(
            f"--model {model!r} has qk_rope_head_dim {rope} and index_head_dim {index_dim}; "
            "the indexer rotates an even number of its dims; give the released model's config.json."
        )
