"""Every setting of the package, in one table.

A setting is read from ``--additional-config '{"dcp_mla": {"name": value}}'``, else from
``VLLM_DCP_MLA_<NAME>``, else it has its default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from .gather_plan import DEFAULT_GATHER_LIMIT_BYTES
from .workspace import DEFAULT_SLAB_LIMIT_BYTES

#: 1,820 rows of top-k 2,048 at dcp 8, 5,461 at dcp 2.
DEFAULT_MERGE_LIMIT_BYTES = 256 << 20

ENV_PREFIX = "VLLM_DCP_MLA_"
CONFIG_KEY = "dcp_mla"
WORKSPACE_ENV = "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE"
#: Read before vLLM's configuration exists, so only the environment can hold them.
ENV_ONLY = frozenset({"allow_untested"})

#: The attention kernels: modules of :mod:`.kernels`, whose classes bear these names.
KernelName = Literal["trtllm_gen", "flashmla", "flash_attn3", "triton_decode", "reference"]
KernelChoice = Literal["auto", KernelName]


class SettingsError(ValueError):
    """A setting that cannot be used; the message names it, what was got and what is allowed."""


class Settings(BaseModel):
    """The settings of one engine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slab_limit_bytes: PositiveInt = Field(
        DEFAULT_SLAB_LIMIT_BYTES,
        description="most bytes of the trtllm-gen softmax-statistics slab; launches are split so "
        "that it suffices",
    )
    gather_limit_bytes: PositiveInt = Field(
        DEFAULT_GATHER_LIMIT_BYTES,
        description="most bytes in which PCP with DCP gathers the keys of prefills; a longer "
        "context is attended in ranges",
    )
    merge_limit_bytes: PositiveInt = Field(
        DEFAULT_MERGE_LIMIT_BYTES,
        description="most bytes in which the ranks exchange top-k candidates of a prefill chunk",
    )
    kernel: KernelChoice = Field(
        "auto",
        description="attention kernel: `trtllm_gen` (SM100), `flashmla`, `flash_attn3`, "
        "`triton_decode` (SM90); `reference` is plain torch and runs on any device, slowly",
    )
    pcp_cached_rows: bool = Field(
        True,
        description="PCP with DCP exchanges keys as they are cached, rounded once as without PCP; "
        "off: bf16, as vLLM does, rounded again in an fp8 cache",
    )
    metrics: bool = Field(
        False,
        description="export the plan that took effect as `dcp_mla:*` gauges on `/metrics`; on, "
        "off or disabled, vLLM gathers its statistics where this package is installed, even under "
        "`--disable-log-stats`",
    )
    disable: bool = Field(False, description="leave vLLM untouched")
    allow_untested: bool = Field(
        False, description="stay on with a vLLM outside the tested range (environment only)"
    )


def env_name(setting: str) -> str:
    """The environment variable of a setting."""
    return ENV_PREFIX + setting.upper()


def load_settings(
    additional_config: Any = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Reads all settings.

    Args:
        additional_config: vLLM's ``additional_config``, a dictionary; None before there is one.
        environ: the environment; ``os.environ`` by default.

    Raises:
        SettingsError: an unknown key or a value that does not fit.
    """
    environ = os.environ if environ is None else environ
    # vLLM also takes objects of other platforms here, which hold nothing of ours.
    known = additional_config if isinstance(additional_config, Mapping) else {}
    section = known.get(CONFIG_KEY) or {}
    if not isinstance(section, Mapping):
        raise SettingsError(
            f'--additional-config "{CONFIG_KEY}" is {section!r}; it must be an object of settings '
            f'such as {{"slab_limit_bytes": {DEFAULT_SLAB_LIMIT_BYTES}}}.'
        )
    for key in ENV_ONLY & set(section):
        raise SettingsError(
            f'--additional-config "{CONFIG_KEY}" has {key}, which is read before the configuration '
            f"exists; set {env_name(key)}=1 instead."
        )
    # An empty variable is an unset one, as for shells and vLLM's launch scripts.
    values = {n: text for n in Settings.model_fields if (text := environ.get(env_name(n)))}
    try:
        return Settings.model_validate({**values, **section})
    except ValidationError as error:
        raise SettingsError(_explain(error, set(section))) from None


def _explain(error: ValidationError, in_config: set[str]) -> str:
    sentences = []
    for problem in error.errors():
        name = str(problem["loc"][0])
        if problem["type"] == "extra_forbidden":
            known = ", ".join(sorted(set(Settings.model_fields) - ENV_ONLY))
            sentences.append(
                f'--additional-config "{CONFIG_KEY}" has {name}, which is not a setting; '
                f"known: {known}."
            )
            continue
        where = (
            f'--additional-config "{CONFIG_KEY}.{name}"' if name in in_config else env_name(name)
        )
        wanted = problem["msg"][0].lower() + problem["msg"][1:]
        if problem["type"].startswith("bool_"):
            wanted = "it must be on or off, 1 or 0, true or false"
        sentences.append(f"{where} is {problem['input']!r}: {wanted}; correct it or leave it out.")
    return " ".join(sentences)


def user_workspace_bytes(environ: Mapping[str, str] | None = None) -> int | None:
    """The user's ``VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE`` in bytes, None when it is not set.

    Raises:
        SettingsError: it is set and not a positive whole number.
    """
    text = (os.environ if environ is None else environ).get(WORKSPACE_ENV)
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise SettingsError(
            f"{WORKSPACE_ENV} is {text!r}; it must be a whole number of bytes such as 1073741824 "
            f"(1 GiB); correct it or unset it."
        )
    return value
