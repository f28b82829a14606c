"""Weights of a rank, by kind and by how vLLM shards them (``vllm.models.deepseek_v32``).

Routed experts are divided by all ranks of a model copy, with or without expert parallelism
(``FusedMoEParallelConfig.make`` flattens tensor and prefill context parallelism). Attention heads,
dense and shared MLPs, the embedding and the head are divided by tensor parallelism; all else is on
every rank.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from enum import Enum

from .checkpoint import Weight
from .model_spec import ModelSpec

_BF16 = 2
_FP32 = 4
_LAYER = re.compile(r"\bmodel\.layers\.(\d+)\.")
_VOCABULARY = ("embed_tokens", "lm_head", "shared_head.head")


class Kind(Enum):
    """Kinds of weights, by sharding; the value is what a table calls them."""

    EXPERTS = "weights: routed experts"
    HEADS = "weights: attention heads"
    MLP = "weights: dense and shared MLPs"
    VOCABULARY = "weights: embedding and head"
    REPLICATED = "weights: replicated"
    DRAFTER = "weights: MTP drafter"
    ABSORBED = "weights: kv_b_proj in bfloat16"


def rank_weights(
    weights: Iterable[Weight], spec: ModelSpec, tp: int, pcp: int, *, drafter: bool
) -> dict[Kind, int]:
    """Bytes of a rank by kind.

    Args:
        weights: the checkpoint.
        spec: the model.
        tp: tensor parallel size.
        pcp: prefill context parallel size.
        drafter: whether the MTP layers are loaded; they share the model's embedding and head.
    """
    totals: Counter[Kind] = Counter()
    for weight in weights:
        layer = _layer_of(weight.name)
        is_drafter = layer is not None and layer >= spec.layers
        kind = _kind_of(weight.name)
        if is_drafter and (not drafter or kind is Kind.VOCABULARY):
            continue
        size = -(-_loaded_bytes(weight) // _ranks(kind, tp, pcp))
        totals[Kind.DRAFTER if is_drafter else kind] += size
        totals[Kind.ABSORBED] += _absorbed_bytes(weight, tp)
    return {kind: totals[kind] for kind in Kind if totals[kind]}


def checkpoint_bytes(weights: Iterable[Weight]) -> int:
    """Bytes of all tensors."""
    return sum(weight.bytes for weight in weights)


def _layer_of(name: str) -> int | None:
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def _kind_of(name: str) -> Kind:
    if any(f"{part}." in name for part in _VOCABULARY):
        return Kind.VOCABULARY
    if ".mlp.experts." in name:
        return Kind.EXPERTS
    if ".self_attn." in name:
        sharded = (".q_b_proj.", ".kv_b_proj.", ".o_proj.")
        return Kind.HEADS if any(part in name for part in sharded) else Kind.REPLICATED
    if re.search(r"\.(gate|up|down)_proj\.", name):
        return Kind.MLP
    return Kind.REPLICATED


def _ranks(kind: Kind, tp: int, pcp: int) -> int:
    if kind is Kind.EXPERTS:
        return tp * pcp
    return 1 if kind is Kind.REPLICATED else tp


def _loaded_bytes(weight: Weight) -> int:
    """vLLM loads the indexer's key projection as bfloat16, its keys' norm as float32."""
    if ".indexer.k_norm." in weight.name:
        return weight.elements * _FP32
    if ".indexer.wk." in weight.name:
        return weight.elements * _BF16 if weight.name.endswith(".weight") else 0
    return weight.bytes


def _absorbed_bytes(weight: Weight, tp: int) -> int:
    """A quantised kv_b_proj is kept beside its bfloat16 form, which decodes multiply with."""
    if not weight.name.endswith(".kv_b_proj.weight") or weight.bytes >= weight.elements * _BF16:
        return 0
    return weight.elements * _BF16 // tp
