"""The differences of two plans that ``plan --json`` wrote."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .request import UNREADABLE, RequestError

_SECTIONS = ("topology", "workspace", "kv", "utilization", "batch", "memory")
_NEEDED = ("ok", "lines", "kv", "utilization")


@dataclass(frozen=True, slots=True)
class Difference:
    """One value that differs; None where a plan does not have it."""

    name: str
    before: Any
    after: Any

    @property
    def change(self) -> float | None:
        """``after - before`` of numbers."""
        if not all(_is_number(value) for value in (self.before, self.after)):
            return None
        return self.after - self.before


def read_plan(path: str) -> dict[str, Any]:
    """Reads a file that ``plan --json`` wrote.

    Raises:
        RequestError: it cannot be read, or is no plan.
    """
    try:
        plan = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(
            [f"{path} cannot be read ({error}); give a file that plan --json wrote."], UNREADABLE
        ) from None
    if not isinstance(plan, dict) or not all(key in plan for key in _NEEDED):
        problem = (
            f"{path} is no plan of one configuration: it lacks {', '.join(_NEEDED)}; write it with "
            "plan --json, without --sweep."
        )
        raise RequestError([problem], UNREADABLE)
    return plan


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[Difference]:
    """What differs, lines first, in the order of the plans."""
    found = [
        Difference(name, old, new)
        for name, old, new in _pairs(_line_bytes(before), _line_bytes(after))
        if old != new
    ]
    for section in _SECTIONS:
        pairs = _pairs(before.get(section) or {}, after.get(section) or {})
        found += [
            Difference(f"{section}.{name}", old, new) for name, old, new in pairs if old != new
        ]
    return found


def _line_bytes(plan: dict[str, Any]) -> dict[str, Any]:
    lines = plan["lines"] if isinstance(plan["lines"], list) else []
    return {str(line.get("name")): line.get("bytes") for line in lines if isinstance(line, dict)}


def _pairs(before: Any, after: Any) -> list[tuple[str, Any, Any]]:
    if not isinstance(before, dict) or not isinstance(after, dict):
        return []
    names = list(dict.fromkeys((*before, *after)))
    return [(name, before.get(name), after.get(name)) for name in names]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
