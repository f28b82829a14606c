"""Bytes of a linear layer's weights as a checkpoint's quantisation stores them: arithmetic only."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Method = Literal["none", "fp8_block", "fp8_tensor", "nvfp4"]

_BF16 = 2
_SCALE = 4  # a float32 scale
_FP4_GROUP = 16  # weights that share one fp8 scale


class UnknownQuantizationError(ValueError):
    """A quantisation whose bytes are not known here; the message names it."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """How linear layers are stored.

    Attributes:
        method: the format of layers that are not ignored.
        block: rows and columns that share a scale, of ``fp8_block``.
        ignore: patterns of module names that stay bfloat16, as in ``fnmatch``.
    """

    method: Method = "none"
    block: tuple[int, int] = (128, 128)
    ignore: tuple[str, ...] = ()

    def is_ignored(self, module: str) -> bool:
        """Whether a module stays bfloat16."""
        return self.method == "none" or any(fnmatch.fnmatch(module, p) for p in self.ignore)

    def linear_bytes(self, module: str, rows: int, columns: int) -> int:
        """Bytes of a ``[rows, columns]`` weight with its scales.

        ``fp8_block``: a byte a weight, a float32 scale a block. ``nvfp4``: half a byte a weight, an
        fp8 scale for 16 of them, and two float32 scales (weight and input) for the layer.
        """
        elements = rows * columns
        if self.is_ignored(module):
            return elements * _BF16
        if self.method == "fp8_block":
            blocks = -(-rows // self.block[0]) * -(-columns // self.block[1])
            return elements + blocks * _SCALE
        if self.method == "fp8_tensor":
            return elements + 2 * _SCALE
        return elements // 2 + elements // _FP4_GROUP + 2 * _SCALE


def read_quantization(config: Mapping[str, Any]) -> Quantization:
    """Reads ``quantization_config`` of a model's ``config.json``.

    Raises:
        UnknownQuantizationError: a method that is not known here.
    """
    section = config.get("quantization_config")
    if section is None:
        return Quantization()
    if not isinstance(section, Mapping):
        raise UnknownQuantizationError(
            f"quantization_config is {section!r}, but it is an object in every known checkpoint; "
            "correct it."
        )
    method = str(section.get("quant_method", "")).lower()
    algorithm = str(section.get("quant_algo", "")).upper()
    ignore = section.get("ignore") or section.get("modules_to_not_convert") or ()
    if not isinstance(ignore, list | tuple):
        raise UnknownQuantizationError(
            f"quantization_config lists what it leaves out as {ignore!r}, but that is a list of "
            "module names; correct it."
        )
    patterns = tuple(str(name) for name in ignore)
    if method == "fp8" or (method == "modelopt" and algorithm == "FP8"):
        block = section.get("weight_block_size")
        if isinstance(block, list) and len(block) == 2 and all(_is_size(b) for b in block):
            return Quantization("fp8_block", (block[0], block[1]), patterns)
        return Quantization("fp8_tensor", ignore=patterns)
    if method in ("modelopt", "modelopt_fp4") and algorithm in ("NVFP4", ""):
        return Quantization("nvfp4", ignore=patterns)
    raise UnknownQuantizationError(
        f"quantization_config has quant_method {method or 'none'!r} and quant_algo "
        f"{algorithm or 'none'!r}; bytes are known for fp8, modelopt FP8 and modelopt NVFP4 only. "
        "Give a folder that holds the checkpoint's safetensors files too, whose bytes are read."
    )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
