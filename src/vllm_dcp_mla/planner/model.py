"""A model's dims and weights, from its folder or from what is built in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..models import BUILT_IN
from .checkpoint import (
    CheckpointError,
    Weight,
    computed_weights,
    read_weights,
    weight_files,
)
from .model_spec import MissingFieldsError, ModelSpec, read_model_spec
from .quantization import UnknownQuantizationError, read_quantization
from .weights import checkpoint_bytes


class ModelMemoryError(ValueError):
    """A model whose memory cannot be said; the message says why."""


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """A model.

    Attributes:
        spec: its dims.
        weights: its checkpoint, tensor by tensor.
        weights_from: where the bytes come from, for a reader.
        fp4_experts: whether routed experts take less than a byte a weight.
    """

    spec: ModelSpec
    weights: list[Weight]
    weights_from: str
    fp4_experts: bool

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of all tensors."""
        return checkpoint_bytes(self.weights)


def read_model(name: str, config: Mapping[str, Any]) -> ModelMemory:
    """Reads a model.

    Args:
        name: a built-in name, or the folder of ``config``.
        config: its ``config.json``.

    Raises:
        ModelMemoryError: fields are missing, a quantisation is not known and no checkpoint is
            there, or a file of it cannot be read.
    """
    folder = None if name in BUILT_IN else Path(name)
    try:
        spec = read_model_spec(config, str(folder / "config.json") if folder else name)
        files = weight_files(folder) if folder else []
        if files:
            weights, source = read_weights(files), f"headers of {len(files)} safetensors files"
        else:
            weights = computed_weights(spec, read_quantization(config))
            source = "computed from config.json"
    except (MissingFieldsError, UnknownQuantizationError, CheckpointError) as error:
        raise ModelMemoryError(str(error)) from None
    return ModelMemory(spec, weights, source, _has_fp4_experts(weights))


def _has_fp4_experts(weights: list[Weight]) -> bool:
    """A header shows NVFP4 by its second scale, a computed entry by less than a byte a weight."""
    experts = [weight for weight in weights if ".mlp.experts." in weight.name]
    return any("weight_scale_2" in w.name or w.bytes < w.elements for w in experts)
