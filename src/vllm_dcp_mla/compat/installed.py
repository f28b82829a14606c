"""What is installed, without importing it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path


def installed_version(distribution: str) -> str | None:
    """A distribution's version, None when it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def package_folder(name: str) -> Path | None:
    """The folder of an installed top-level package, None when there is none."""
    try:
        spec = find_spec(name)
    except ValueError:  # a half-imported or replaced module has no spec
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))
