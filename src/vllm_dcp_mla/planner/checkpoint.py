"""What a checkpoint holds, tensor by tensor: computed from the config, or read off its files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .model_spec import ModelSpec
from .quantization import Quantization

INDEX_FILE = "model.safetensors.index.json"
_BF16 = 2
_FP32 = 4
_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}


#: One of so many files.
_NUMBERED = re.compile(r"-\d+-of-(\d{1,9})\.safetensors$")


class CheckpointError(ValueError):
    """A checkpoint that cannot be read; the message names the file and what to do."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor, or several of the same module.

    Attributes:
        name: as in the checkpoint; experts of a layer are one entry here where it is computed.
        elements: numbers in it.
        bytes: what it takes in the file.
    """

    name: str
    elements: int
    bytes: int


def computed_weights(spec: ModelSpec, quantization: Quantization) -> list[Weight]:
    """The checkpoint that follows from a config, its MTP layers included."""
    return list(_computed(spec, quantization))


def _computed(spec: ModelSpec, quantization: Quantization) -> Iterator[Weight]:
    def linear(module: str, rows: int, columns: int, copies: int = 1) -> Weight:
        size = quantization.linear_bytes(module, rows, columns)
        return Weight(f"{module}.weight", copies * rows * columns, copies * size)

    def plain(name: str, elements: int, width: int = _BF16) -> Weight:
        return Weight(name, elements, elements * width)

    hidden = spec.hidden_size
    yield plain("model.embed_tokens.weight", spec.vocab_size * hidden)
    yield plain("lm_head.weight", spec.vocab_size * hidden)
    yield plain("model.norm.weight", hidden)
    for layer in range(spec.layers + spec.mtp_layers):
        name = f"model.layers.{layer}"
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        yield linear(f"{attention}.q_a_proj", spec.q_lora_rank, hidden)
        yield plain(f"{attention}.q_a_layernorm.weight", spec.q_lora_rank)
        query = spec.heads * (spec.qk_nope_head_dim + spec.qk_rope_head_dim)
        yield linear(f"{attention}.q_b_proj", query, spec.q_lora_rank)
        yield linear(f"{attention}.kv_a_proj_with_mqa", spec.cache_row_width, hidden)
        yield plain(f"{attention}.kv_a_layernorm.weight", spec.kv_lora_rank)
        key_value = spec.heads * (spec.qk_nope_head_dim + spec.v_head_dim)
        yield linear(f"{attention}.kv_b_proj", key_value, spec.kv_lora_rank)
        yield linear(f"{attention}.o_proj", hidden, spec.heads * spec.v_head_dim)
        is_mtp = layer >= spec.layers
        if is_mtp or layer in spec.indexer_layers:
            indexer = f"{attention}.indexer"
            rows = spec.index_heads * spec.index_head_dim
            yield linear(f"{indexer}.wq_b", rows, spec.q_lora_rank)
            yield linear(f"{indexer}.wk", spec.index_head_dim, hidden)
            yield plain(f"{indexer}.weights_proj.weight", spec.index_heads * hidden)
            yield plain(f"{indexer}.k_norm.weight", 2 * spec.index_head_dim, _FP32)
        yield plain(f"{name}.input_layernorm.weight", 2 * hidden)
        if spec.is_moe(layer):
            width, experts = spec.moe_intermediate_size, spec.routed_experts
            yield plain(f"{mlp}.gate.weight", experts * hidden)
            yield plain(f"{mlp}.gate.e_score_correction_bias", experts, _FP32)
            yield linear(f"{mlp}.experts.gate_proj", width, hidden, experts)
            yield linear(f"{mlp}.experts.up_proj", width, hidden, experts)
            yield linear(f"{mlp}.experts.down_proj", hidden, width, experts)
            mlp, width = f"{mlp}.shared_experts", width * spec.shared_experts
        else:
            width = spec.intermediate_size
        if width:
            yield linear(f"{mlp}.gate_proj", width, hidden)
            yield linear(f"{mlp}.up_proj", width, hidden)
            yield linear(f"{mlp}.down_proj", hidden, width)
        if is_mtp:
            yield plain(f"{name}.eh_proj.weight", 2 * hidden * hidden)
            yield plain(f"{name}.norms.weight", 3 * hidden)
            yield plain(f"{name}.embed_tokens.weight", spec.vocab_size * hidden)
            yield plain(f"{name}.shared_head.head.weight", spec.vocab_size * hidden)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, by its index where it has one; empty without any.

    Raises:
        CheckpointError: an index that cannot be read, or a file that it, or the others' names, say
            is missing.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        files = sorted(file for file in folder.glob("*.safetensors") if file.is_file())
        numbered = [match for file in files if (match := _NUMBERED.search(file.name))]
        if numbered and len(numbered) < (wanted := int(numbered[0][1])):
            raise CheckpointError(
                f"{folder} holds {len(numbered)} of {wanted} numbered files, by their names; "
                "download the rest, or remove the files to have the bytes computed."
            )
        return files
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} cannot be read ({type(error).__name__}: {error}); download it again."
        ) from None
    files = [folder / str(name) for name in names]
    there = [file for file in files if file.is_file()]
    if there and len(there) < len(files):
        absent = next(file.name for file in files if not file.is_file())
        raise CheckpointError(
            f"{folder} holds {len(there)} of the {len(files)} files that its index names, {absent} "
            "is missing; download the rest, or remove the files to have the bytes computed."
        )
    return there


def read_weights(files: list[Path]) -> list[Weight]:
    """The tensors of safetensors files, from their headers alone.

    Raises:
        CheckpointError: the library is missing, or a file is no safetensors file.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise CheckpointError(
            "The checkpoint's files can only be read with safetensors, which is not installed; pip "
            "install safetensors numpy."
        ) from None
    weights = []
    for file in files:
        try:
            with safe_open(file, framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118  (no mapping)
                    entry = opened.get_slice(name)
                    elements = math.prod(entry.get_shape())
                    width = _BYTES.get(entry.get_dtype(), 1)
                    weights.append(Weight(name, elements, elements * width))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{file} cannot be read as safetensors ({error}); download it again."
            ) from None
    return weights
