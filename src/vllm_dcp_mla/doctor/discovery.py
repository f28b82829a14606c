"""Is the plugin found, allowed and registered in the processes that vLLM starts?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..compat.installed import package_folder
from ..plugin import ALIAS_PATH, alias, overrides, why_off
from ..settings import ENV_PREFIX, SettingsError, env_name, load_settings, user_workspace_bytes
from .probe import DISTRIBUTION, GROUP
from .processes import Probed
from .report import Check
from .versions import INSTALL_VLLM

ENTRY_POINT = "dcp_mla"
ENTRY_POINT_VALUE = "vllm_dcp_mla.plugin:register"
PLUGINS_ENV = "VLLM_PLUGINS"
#: Of a name that was meant, as difflib measures it.
_CLOSE = 0.6
_INSTALL = f"pip install --force-reinstall --no-deps {DISTRIBUTION}"


def members() -> tuple[str, ...]:
    """The backend names that are this package's with the installed vLLM."""
    return (*overrides(), alias())


def check_discovered(probed: Probed) -> list[Check]:
    """Whether a fresh process finds the entry point, one installation, and that one's package."""
    expected = f"{ENTRY_POINT} = {ENTRY_POINT_VALUE} in {GROUP}"
    metadata = probed.sections.get("metadata")
    if metadata is None:
        found = f"a fresh Python process failed: {probed.error}"
        return [Check("plugin discovered", "fail", found, expected, "repair this Python first")]
    values = [e["value"] for e in metadata["entry_points"] if e["name"] == ENTRY_POINT]
    if values == [ENTRY_POINT_VALUE]:
        discovered = Check("plugin discovered", "pass", expected, expected)
    elif ENTRY_POINT_VALUE in values:
        found = f"{len(values)} entry points named {ENTRY_POINT}: {', '.join(values)}"
        fix = f"uninstall the other plugin that calls itself {ENTRY_POINT}"
        discovered = Check("plugin discovered", "warn", found, expected, fix)
    else:
        found = f"{ENTRY_POINT} = {', '.join(values)}" if values else f"no {ENTRY_POINT} in {GROUP}"
        discovered = Check("plugin discovered", "fail", found, expected, _INSTALL)
    return [discovered, _check_installation(metadata)]


def _check_installation(metadata: Mapping[str, Any]) -> Check:
    name, expected = "one installation", f"one {DISTRIBUTION}, imported from where it says"
    by_path = {os.path.realpath(d["metadata"]): d for d in metadata["distributions"]}
    imported = metadata["imported_from"]
    if not by_path:
        found = f"no distribution {DISTRIBUTION}; the package comes from {imported}"
        return Check(name, "fail", found, expected, f"{_INSTALL} (PYTHONPATH does not suffice)")
    if len(by_path) > 1:
        found = f"{len(by_path)} distributions: {', '.join(by_path)}"
        eggs = [path for path in by_path if path.endswith(".egg-info")]
        fix = (
            f"remove the stale {', '.join(eggs)}: it can hide the entry point"
            if eggs
            else f"pip uninstall {DISTRIBUTION} until none is left, then install it once"
        )
        return Check(name, "warn", found, expected, fix)
    (distribution,) = by_path.values()
    said = distribution["folder"]
    if said is None or imported is None or not _inside(imported, said):
        found = f"{DISTRIBUTION} {distribution['version']} says {said}, imported from {imported}"
        fix = "unset PYTHONPATH, or install from the folder that it names"
        return Check(name, "warn", found, expected, fix)
    return Check(name, "pass", f"{distribution['version']} from {imported}", expected)


def _inside(path: str, folder: str) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def check_allowed(environ: Mapping[str, str]) -> Check:
    """Whether ``VLLM_PLUGINS`` lets the plugin load."""
    name, expected = PLUGINS_ENV, f"unset, or a list that holds {ENTRY_POINT}"
    text = environ.get(PLUGINS_ENV)
    if text is None:
        return Check(name, "pass", "unset: all plugins load", expected)
    names = text.split(",")
    if ENTRY_POINT in names:
        return Check(name, "pass", repr(text), expected)
    if ENTRY_POINT in [spaced.strip() for spaced in names]:
        fix = f"remove the spaces, which vLLM keeps: {PLUGINS_ENV}={text.replace(' ', '')}"
    elif text.strip():
        fix = f"{PLUGINS_ENV}={text},{ENTRY_POINT}"
    else:
        fix = f"unset it, or {PLUGINS_ENV}={ENTRY_POINT}"
    return Check(name, "fail", f"{text!r} leaves {ENTRY_POINT} out", expected, fix)


def check_settings(environ: Mapping[str, str]) -> Check:
    """Whether the settings in the environment can be used."""
    name, expected = "settings", "values that can be used, and not switched off"
    try:
        settings = load_settings(environ=environ)
        user_workspace_bytes(environ)
    except SettingsError as error:
        return Check(name, "fail", str(error), expected, "correct or unset the variable")
    if settings.disable:
        off = env_name("disable")
        found = f"{off}={environ[off]}: vLLM is left untouched"
        return Check(name, "warn", found, expected, f"unset {off}")
    known = {env_name(n) for n in type(settings).model_fields}
    strange = sorted(n for n in environ if n.startswith(ENV_PREFIX) and n not in known)
    if strange:
        meant = strange[0].removeprefix(ENV_PREFIX).lower()
        near = get_close_matches(meant, type(settings).model_fields, 1, _CLOSE)
        fix = f"unset {', '.join(strange)}" + (
            f"; did you mean {env_name(near[0])}?" if near else ""
        )
        found = f"{', '.join(strange)}: no setting, and nothing reads it"
        return Check(name, "warn", found, expected, fix)
    changed = [env_name(n) for n in type(settings).model_fields if env_name(n) in environ]
    return Check(name, "pass", ", ".join(changed) or "all at their defaults", expected)


def _switched_off(environ: Mapping[str, str]) -> bool:
    try:
        return load_settings(environ=environ).disable
    except SettingsError:
        return False


def check_members(probed: Probed, environ: Mapping[str, str]) -> list[Check]:
    """By whom each backend that the plugin serves is overridden, once plugins are loaded."""
    registry = probed.sections.get("registry")
    if registry is None:
        if package_folder("vllm") is None:
            found, fix = "vLLM is not installed", INSTALL_VLLM
        else:
            found, fix = f"vLLM does not load: {probed.error}", "reinstall vLLM and its torch"
        return [Check("registered backends", "fail", found, "vLLM's registry", fix)]
    return [_check_member(name, registry["members"].get(name), environ) for name in members()]


def _check_member(name: str, member: Mapping[str, Any] | None, environ: Mapping[str, str]) -> Check:
    ours = overrides().get(name, ALIAS_PATH)
    title, expected = f"backend {name}", f"ours: {ours}"
    if member is not None and member["path"] == ours:
        return Check(title, "pass", f"ours: {ours}", expected)
    if member is not None and member["overridden"]:
        found = f"another plugin's: {member['path']}"
        fix = f"uninstall that plugin, or name one of the two in {PLUGINS_ENV}"
        return Check(title, "fail", found, expected, fix)
    found = "not registered" if member is None else f"stock: {member['path']}"
    reason = why_off()
    if _switched_off(environ):
        return Check(title, "warn", found, expected, f"unset {env_name('disable')}")
    return Check(title, "fail", found, expected, reason or "see the checks above")
