"""One flag over several values: which plans work, and what each leaves for the KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .request import UNREADABLE, RequestError

_MOST_VALUES = 32


@dataclass(frozen=True, slots=True)
class Sweep:
    """A flag, without dashes, and the values that it takes."""

    flag: str
    values: list[str]


def read_sweep(text: str, known: tuple[str, ...]) -> Sweep:
    """Reads ``FLAG=a,b,c``.

    Raises:
        RequestError: no such flag, or no values.
    """
    flag, _, listed = text.partition("=")
    flag = flag.strip().lstrip("-")
    values = list(dict.fromkeys(value.strip() for value in listed.split(",") if value.strip()))
    if flag not in known:
        raise RequestError(
            [f"--sweep has the flag {flag!r}, which cannot be swept; use {', '.join(known)}."],
            UNREADABLE,
        )
    if not 1 <= len(values) <= _MOST_VALUES:
        problem = (
            f"--sweep has {len(values)} values for {flag}; give 1 to {_MOST_VALUES}, such as "
            f"--sweep {flag}=1,2."
        )
        raise RequestError([problem], UNREADABLE)
    return Sweep(flag, values)


def run_sweep(sweep: Sweep, plan: Callable[[str, str], dict[str, Any]]) -> list[dict[str, Any]]:
    """The JSON of each plan, with its value under ``value``.

    Args:
        sweep: the flag and its values.
        plan: plans with (flag, value).
    """
    return [{"value": value, **plan(sweep.flag, value)} for value in sweep.values]
