"""Configurations of the models that the command line knows by name."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

#: Name on the command line: file beside this one. The layers that glm-5.2-nvfp4 leaves in bfloat16
#: are those that give its published size (about 465 GB), not read off the checkpoint.
BUILT_IN = {
    "glm-5.2": "glm-5.2.json",
    "glm-5.2-fp8": "glm-5.2-fp8.json",
    "glm-5.2-nvfp4": "glm-5.2-nvfp4.json",
    "deepseek-v3.2": "deepseek-v3.2.json",
}

#: Above it, a dim is a mistake in the file.
_MOST = 1 << 20


class ModelConfigError(ValueError):
    """A model that cannot be read; the message says what to give instead."""


class UnservedModelError(ModelConfigError):
    """A model that was read, and is no MLA model with an indexer."""


def load_config(name: str) -> dict[str, Any]:
    """A model's ``config.json`` as a dictionary.

    Args:
        name: a name of :data:`BUILT_IN`, or a folder with a ``config.json``.

    Raises:
        ModelConfigError: neither, or a file that is no JSON object.
        UnservedModelError: no MLA model with an indexer.
    """
    if name in BUILT_IN:
        return json.loads(files(__name__).joinpath(BUILT_IN[name]).read_text())
    path = Path(name) / "config.json"
    if not _is_file(path):
        raise ModelConfigError(
            f"--model is {name!r}, neither a folder with a config.json nor one of "
            f"{', '.join(BUILT_IN)}; give one of these."
        )
    try:
        config = json.loads(path.read_text())
    # ValueError: broken JSON, no UTF-8, or a number of thousands of digits.
    except (OSError, ValueError, RecursionError) as error:
        raise ModelConfigError(f"{path} cannot be read: {error}; correct it.") from None
    if not isinstance(config, dict):
        raise ModelConfigError(f"{path} holds no JSON object; give a model's config.json.")
    wanted = ("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")
    missing = [key for key in (*wanted, "index_topk") if not _is_count(config, key)]
    if missing:
        raise UnservedModelError(
            f"{path} has no usable {', '.join(missing)}: sparse MLA needs an MLA model with an "
            "indexer, such as GLM-5.x or DeepSeek-V3.2; give its folder."
        )
    return config


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a folder that may not be entered, or a name that no file can have
        return False


def _is_count(config: dict[str, Any], key: str) -> bool:
    value = config.get(key)
    floor = 0 if key == "qk_rope_head_dim" else 1
    return isinstance(value, int) and not isinstance(value, bool) and floor <= value <= _MOST
