"""The entry point that vLLM calls in every process; importing it loads the standard library only.

``register`` points members of vLLM's backend registry at :mod:`.backends.members`, by path: nothing
of it is imported before vLLM selects a backend.
"""

from __future__ import annotations

import logging
from typing import Any

# vLLM's handlers and level apply to loggers under its own name.
logger = logging.getLogger("vllm.dcp_mla")

#: A name of this package's own, where vLLM takes new ones; :func:`alias` says which it is.
ALIAS = "DCP_MLA_SPARSE"
_MEMBERS = "vllm_dcp_mla.backends.members"
#: Enum member: path of what it resolves to.
OVERRIDES = {
    "FLASHINFER_MLA_SPARSE": f"{_MEMBERS}.FlashInferMLASparse",
    "FLASH_ATTN_MLA_SPARSE_FA4": f"{_MEMBERS}.FlashAttnMLASparseFA4",
    "FLASH_ATTN_MLA_SPARSE": f"{_MEMBERS}.FlashAttnMLASparse",
    "FLASHMLA_SPARSE": f"{_MEMBERS}.FlashMLASparse",
}
ALIAS_PATH = f"{_MEMBERS}.DcpMlaSparse"

_registered = False


def register() -> None:
    """Registers the backends in this process, once; calling it again changes nothing.

    Where the package cannot serve the installed vLLM it stays off as a whole and says why in one
    line. Never raises for that.
    """
    global _registered
    if _registered:
        return
    _registered = True
    from . import __version__
    from .compat import dcp_order
    from .compat.releases import installed_release
    from .compat.upstream import left_to_stock

    reason = why_off()
    if reason is not None:
        logger.warning("vllm-dcp-mla is off: %s", reason)
        return
    _announce_environment()
    if installed_release().gathers_here:
        dcp_order.install()
    served = _override(overrides())
    if alias() == ALIAS:
        register_alias()
        served.append(ALIAS)
    else:
        served += _override({alias(): ALIAS_PATH})
    logger.info(
        "vllm-dcp-mla %s serves sparse MLA under decode context parallelism: %s.",
        __version__,
        ", ".join(served) or "no member",
    )
    release = installed_release()
    if left := left_to_stock(release):
        logger.info("Left to vLLM %s, which does it itself: %s.", release.series, "; ".join(left))


def overrides() -> dict[str, str]:
    """The members of :data:`OVERRIDES` that are overridden with the installed vLLM."""
    from .compat.releases import installed_release

    stays = installed_release().left_to_stock
    return {name: path for name, path in OVERRIDES.items() if name not in stays}


def alias() -> str:
    """The name that means this package's class of the GPU, for ``--attention-backend``."""
    from .compat.releases import installed_release

    return ALIAS if installed_release().takes_new_names else "CUSTOM"


def why_off() -> str | None:
    """Why the package leaves this vLLM untouched, None when it does not."""
    from .compat import installed, versions
    from .compat.symbols import missing_symbols
    from .settings import SettingsError, env_name, load_settings

    try:
        settings = load_settings()
    except SettingsError as error:
        return str(error)
    if settings.disable:
        return f"{env_name('disable')} is set; vLLM is untouched."
    found = installed.installed_version("vllm")
    if found is None:
        return f"vLLM is not installed as a distribution; install vllm{versions.TESTED}."
    try:
        tested = versions.is_tested(found)
    except ValueError:  # "dev" and the like
        tested = False
    if not tested and not settings.allow_untested:
        return (
            f"vLLM {found} is outside the tested range {versions.TESTED}; install one inside "
            f"it, or set {env_name('allow_untested')}=1 to try this one."
        )
    try:
        missing = missing_symbols()
    except (OSError, SyntaxError, ValueError) as error:
        missing = [f"its source cannot be read ({error})"]
    if missing:
        return (
            f"vLLM {found} differs from what this package relies on: {'; '.join(missing)}; "
            f"install vllm{versions.TESTED} or a newer vllm-dcp-mla."
        )
    return None


def _announce_environment() -> None:
    """Adds our variables to vLLM's registry, so that it does not call them unknown."""
    import os

    import vllm.envs as envs

    from .settings import Settings, env_name

    for setting in Settings.model_fields:
        name = env_name(setting)
        envs.environment_variables.setdefault(name, lambda name=name: os.environ.get(name))


def _override(paths: dict[str, str]) -> list[str]:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    served = []
    # All are looked up before the first is overridden: never half on.
    members = {name: AttentionBackendEnum[name] for name in paths}
    for name, path in paths.items():
        member = members[name]
        if member.is_overridden() and member.get_path() != path:
            logger.warning(
                "%s is already overridden by %s and is left alone; DCP on it is not served by "
                "vllm-dcp-mla. Uninstall one of the two plugins, or name one in VLLM_PLUGINS.",
                name,
                member.get_path(),
            )
            continue
        register_backend(member, path)
        served.append(name)
    return served


def register_alias() -> None:
    """Makes ``--attention-backend DCP_MLA_SPARSE`` known, also to processes that unpickle it."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if ALIAS not in AttentionBackendEnum.__members__:
        register_backend(ALIAS, ALIAS_PATH)
    # An enum member pickles as its value, and a spawned child unpickles its configuration before it
    # loads plugins: it would not know the value. Pickled as a call into this module, it registers.
    member: Any = AttentionBackendEnum[ALIAS]
    member.__reduce_ex__ = lambda protocol: (resolve_alias, ())


def resolve_alias() -> Any:
    """The alias member; registers it where it is not known yet."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register_alias()
    return AttentionBackendEnum[ALIAS]
