"""What the memory of a DSA model follows from, read off its ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Fields without a default in vLLM; a config that lacks one is named with it.
REQUIRED = (
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "n_routed_experts", "num_experts_per_tok"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("index_n_heads", "index_head_dim", "index_topk", "max_position_embeddings"),
)
_MAY_BE_ZERO = frozenset({"qk_rope_head_dim", "n_routed_experts"})
_MOST = 1 << 31
#: Fields that count layers; above this one is a mistake in the file.
_LAYER_FIELDS = ("num_hidden_layers", "num_nextn_predict_layers")
_MOST_LAYERS = 1 << 12
_SHOWN_CHARACTERS = 40


class MissingFieldsError(ValueError):
    """A config without the fields that the memory follows from; the message names them."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The dims; heads are query heads before tensor parallelism.

    Attributes:
        indexer_layers: layers of the model proper that have an indexer, in order.
        mtp_layers: layers of the MTP drafter in the checkpoint.
        shares_indices: whether some layers reuse the choice of another one.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    layers: int
    heads: int
    routed_experts: int
    shared_experts: int
    experts_per_token: int
    first_dense_layers: int
    moe_layer_freq: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_heads: int
    index_head_dim: int
    index_topk: int
    indexer_layers: tuple[int, ...]
    mtp_layers: int
    max_position_embeddings: int
    rope_table_bytes: int

    @property
    def shares_indices(self) -> bool:
        """Whether some layers reuse the choice of another one."""
        return len(self.indexer_layers) < self.layers

    @property
    def cache_row_width(self) -> int:
        """Numbers of a token in the MLA cache of a layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def index_row_bytes(self) -> int:
        """Bytes of a token in an indexer's cache: fp8 numbers, a float32 scale for 128 of them."""
        return self.index_head_dim + self.index_head_dim // 128 * 4

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has routed experts (MTP layers are counted on after the model's)."""
        return (
            self.routed_experts > 0
            and layer >= self.first_dense_layers
            and layer % self.moe_layer_freq == 0
        )


def read_model_spec(config: Mapping[str, Any], where: str) -> ModelSpec:
    """Reads a config.

    Args:
        config: the model's ``config.json``.
        where: what to call it in an error.

    Raises:
        MissingFieldsError: fields are missing or are no counts.
    """
    unusable = [key for key in REQUIRED if not _is_count(config.get(key), key in _MAY_BE_ZERO)]
    unusable += [key for key in _LAYER_FIELDS if _optional(config, key, 0) > _MOST_LAYERS]
    unusable += [key for key, is_usable in _USABLE.items() if not is_usable(config.get(key))]
    if unusable:
        got = ", ".join(f"{key} ({_shown(config, key)})" for key in unusable)
        raise MissingFieldsError(
            f"{where} has no usable {got}: the memory of an engine follows from such fields, which "
            "are whole numbers but for patterns and scalings; give the config.json of a GLM-5.x or "
            "DeepSeek-V3.2 model."
        )
    layers = config["num_hidden_layers"]
    return ModelSpec(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        moe_intermediate_size=config["moe_intermediate_size"],
        layers=layers,
        heads=config["num_attention_heads"],
        routed_experts=config["n_routed_experts"],
        shared_experts=_optional(config, "n_shared_experts", 0),
        experts_per_token=config["num_experts_per_tok"],
        first_dense_layers=_optional(config, "first_k_dense_replace", 0),
        moe_layer_freq=_optional(config, "moe_layer_freq", 1),
        q_lora_rank=config["q_lora_rank"],
        kv_lora_rank=config["kv_lora_rank"],
        qk_nope_head_dim=config["qk_nope_head_dim"],
        qk_rope_head_dim=config["qk_rope_head_dim"],
        v_head_dim=config["v_head_dim"],
        index_heads=config["index_n_heads"],
        index_head_dim=config["index_head_dim"],
        index_topk=config["index_topk"],
        indexer_layers=tuple(i for i in range(layers) if _has_indexer(config, i)),
        mtp_layers=_optional(config, "num_nextn_predict_layers", 0),
        max_position_embeddings=config["max_position_embeddings"],
        rope_table_bytes=_rope_table_bytes(config),
    )


def _has_indexer(config: Mapping[str, Any], layer: int) -> bool:
    """``DeepseekV32Attention.__init__``: a layer that skips top-k reuses the choice before it."""
    pattern = config.get("index_topk_pattern")
    if pattern is not None:
        return not (layer < len(pattern) and pattern[layer] == "S")
    freq = _optional(config, "index_topk_freq", 1)
    offset = _optional(config, "index_skip_topk_offset", 2)
    return max(layer - offset + 1, 0) % freq == 0


def _rope_table_bytes(config: Mapping[str, Any]) -> int:
    """Rotary tables, shared by all layers: bf16 by default, two of float32 with YaRN."""
    width = config["qk_rope_head_dim"]
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return config["max_position_embeddings"] * width * 2
    original = scaling.get("original_max_position_embeddings", config["max_position_embeddings"])
    return 2 * int(original * scaling.get("factor", 1)) * width * 4


def _shown(config: Mapping[str, Any], key: str) -> str:
    if key not in config:
        return "left out"
    text = repr(config[key])
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _is_optional_count(value: object) -> bool:
    return value is None or _is_count(value, may_be_zero=True)


def _is_optional_period(value: object) -> bool:
    return value is None or _is_count(value, may_be_zero=False)


def _is_pattern(value: object) -> bool:
    return value is None or isinstance(value, str | list)


def _is_scaling(value: object) -> bool:
    if value is None:
        return True
    if not isinstance(value, Mapping):
        return False
    numbers = (value.get(key, 1) for key in ("factor", "original_max_position_embeddings"))
    return all(_is_number(number) for number in numbers)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _MOST


#: Fields that a config may leave out, but not fill with something else.
_USABLE = {
    "n_shared_experts": _is_optional_count,
    "first_k_dense_replace": _is_optional_count,
    "moe_layer_freq": _is_optional_period,
    "num_nextn_predict_layers": _is_optional_count,
    "index_topk_freq": _is_optional_period,
    "index_skip_topk_offset": _is_optional_count,
    "index_topk_pattern": _is_pattern,
    "rope_parameters": _is_scaling,
    "rope_scaling": _is_scaling,
}


def _optional(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key, default)
    return value if _is_count(value, may_be_zero=True) else default


def _is_count(value: object, may_be_zero: bool) -> bool:
    floor = 0 if may_be_zero else 1
    return isinstance(value, int) and not isinstance(value, bool) and floor <= value <= _MOST
