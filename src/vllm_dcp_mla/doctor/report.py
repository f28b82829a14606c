"""Checks and what they found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["pass", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """One finding.

    Attributes:
        name: what was looked at.
        status: ``warn`` leaves the package working, ``fail`` does not.
        found: what there is.
        expected: what there should be.
        fix: what to do; empty where nothing is wrong.
    """

    name: str
    status: Status
    found: str
    expected: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which backend vLLM picks.

    Attributes:
        picked: its name, None when there is none or vLLM was not asked.
        cls: its class, ``module.Class``.
        refused: reasons of the other sparse backends, by name.
    """

    picked: str | None = None
    cls: str | None = None
    refused: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """All findings."""

    checks: list[Check]
    selection: Selection = Selection()

    @property
    def ok(self) -> bool:
        """Whether no check fails."""
        return all(check.status != "fail" for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """The machine-readable report."""
        return {
            "ok": self.ok,
            "checks": [asdict(check) for check in self.checks],
            "selection": {
                "picked": self.selection.picked,
                "class": self.selection.cls,
                "refused": self.selection.refused,
            },
        }
