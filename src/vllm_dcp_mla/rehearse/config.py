"""The ``config.json`` of a small model with a released DSA model's attention dims and flags."""

from __future__ import annotations

from typing import Any, Literal

from ..models import ModelConfigError, UnservedModelError, load_config

#: What vLLM's ``models/deepseek_v32`` serves.
ARCHITECTURES = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")

#: Widths for which vLLM has the kernel that merges top-k candidates of DCP ranks.
INDEX_TOPK = (512, 1024, 2048)

#: How attention logits and index scores are distributed over keys; see :mod:`.weights`.
Scores = Literal["normal", "heavy"]
SCORES: tuple[Scores, ...] = ("normal", "heavy")

HIDDEN_SIZE = 1024
INTERMEDIATE_SIZE = 1024
MOE_INTERMEDIATE_SIZE = 512
VOCAB_SIZE = 2048
MAX_MODEL_LEN = 16384

#: Counts that tensors are shaped by: needed, and where absent or null the value behind.
_COUNTS = ("q_lora_rank", "v_head_dim", "index_n_heads", "index_head_dim", "num_experts_per_tok")
_OPTIONAL = {
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "index_topk_freq": 1,
    "max_position_embeddings": MAX_MODEL_LEN,
}

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


def small_config(
    model: str, *, index_topk: int | None = None, max_model_len: int = MAX_MODEL_LEN
) -> dict[str, Any]:
    """The small model's ``config.json``; needs no torch.

    Args:
        model: a bundled name, or a folder with the ``config.json`` of a DSA model.
        index_topk: keys a token selects, instead of the model's: one of :data:`INDEX_TOPK`.
        max_model_len: longest context, where the model's is longer and no scaling needs all of it.

    Raises:
        ModelConfigError: the model cannot be read, lacks a dim, or selects another number of keys.
        UnservedModelError: no DSA model that vLLM's ``models/deepseek_v32`` serves.
    """
    released = load_config(model)
    _check(model, released)
    config = {key: value for key, value in released.items() if key not in _DROPPED}
    config |= {
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "moe_intermediate_size": MOE_INTERMEDIATE_SIZE,
        "vocab_size": VOCAB_SIZE,
        "index_topk": _topk(model, released["index_topk"], index_topk),
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 1,
        "num_key_value_heads": released["num_attention_heads"],
        "n_shared_experts": count(released, "n_shared_experts"),
    }
    # What these models' releases say; vLLM has other defaults, Transformers knows nothing else.
    config.setdefault("topk_method", "noaux_tc")
    config.setdefault("scoring_func", "sigmoid")
    positions = count(released, "max_position_embeddings")
    if rope(config).get("factor", 1) == 1:  # else YaRN's factor says how many there are
        positions = min(max_model_len, positions)  # a rope table of a million rows is 256 MiB
    config["max_position_embeddings"] = positions
    _fit_layers(config)
    _fit_experts(config)
    return config


def count(config: dict[str, Any], key: str) -> int:
    """A count that may be absent or null."""
    value = config.get(key)
    return _OPTIONAL[key] if value is None else value


def rope(config: dict[str, Any]) -> dict[str, Any]:
    """The rope parameters, by the older or the newer name."""
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def leader(config: dict[str, Any], layer: int) -> int:
    """The layer whose indexer chooses the keys of a layer, by the rule of stock vLLM's attention.

    The MTP layer (``num_hidden_layers``) has an indexer of its own.
    """
    if layer >= config["num_hidden_layers"]:
        return layer
    pattern, freq = config.get("index_topk_pattern"), count(config, "index_topk_freq")
    offset = config.get("index_skip_topk_offset", 2)
    while pattern[layer] == "S" if pattern else max(layer - offset + 1, 0) % freq:
        layer -= 1
    return layer


def followers(config: dict[str, Any]) -> tuple[int, ...]:
    """The layers without an indexer, which take their leader's keys."""
    return tuple(i for i in range(config["num_hidden_layers"]) if leader(config, i) != i)


def _fit_layers(config: dict[str, Any]) -> None:
    """Two dense leaders and a follower where the model shares indices, else two layers."""
    pattern = config.get("index_topk_pattern")
    shares = "S" in pattern if pattern else count(config, "index_topk_freq") > 1
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
    groups, kept = count(config, "n_group"), count(config, "topk_group")
    chosen = config["num_experts_per_tok"]
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
    if not isinstance(architectures, list) or architectures[:1] not in [[a] for a in ARCHITECTURES]:
        raise UnservedModelError(
            f"--model {model!r} is {architectures}; a rehearsal needs one of "
            f"{', '.join(ARCHITECTURES)} under architectures in its config.json."
        )
    wrong = [key for key in _COUNTS if not _is_count(config.get(key))]
    wrong += [key for key in _OPTIONAL if not _is_count(count(config, key))]
    wrong += [key for key in ("rope_scaling", "rope_parameters") if not _is_dict(config.get(key))]
    if type(config.get("index_skip_topk_offset", 2)) is not int:
        wrong.append("index_skip_topk_offset")
    if not isinstance(config.get("index_topk_pattern") or "", str):
        wrong.append("index_topk_pattern")
    if wrong:
        raise ModelConfigError(
            f"--model {model!r} has no usable {', '.join(wrong)} in its config.json; "
            "give the released model's."
        )
    rotated, index_dim = config["qk_rope_head_dim"], config["index_head_dim"]
    if rotated < 2 or rotated % 2 or index_dim < rotated:
        raise ModelConfigError(
            f"--model {model!r} has qk_rope_head_dim {rotated} and index_head_dim {index_dim}; "
            "the indexer rotates an even number of its dims; give the released model's config.json."
        )


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value <= 1 << 20


def _is_dict(value: object) -> bool:
    return value is None or isinstance(value, dict)
