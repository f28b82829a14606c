"""Runs the probe in fresh processes, started as vLLM's own are: without the current folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .probe import PREFIX

_PROBE = Path(__file__).with_name("probe.py")
_TIMEOUT_S = 180


@dataclass(frozen=True, slots=True)
class Probed:
    """What a probe said.

    Attributes:
        sections: by name; those that it got to.
        error: the last line of what ended it early, None when nothing did.
    """

    sections: dict[str, dict[str, Any]]
    error: str | None = None


def run_probe(
    kind: str, arguments: tuple[str, ...] = (), environ: Mapping[str, str] | None = None
) -> Probed:
    """Runs one probe.

    Args:
        kind: ``metadata``, or ``runtime`` (torch and vLLM; seconds of imports).
        arguments: of the probe.
        environ: its environment; this one's by default.
    """
    env = dict(os.environ if environ is None else environ)
    env["VLLM_NO_USAGE_STATS"] = "1"
    env["HF_HUB_OFFLINE"] = "1"
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(_PROBE), kind, *arguments],
            env=env,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return Probed({}, f"no answer within {_TIMEOUT_S} s")
    except OSError as error:
        return Probed({}, f"{sys.executable} cannot be started: {error}")
    sections = {}
    for line in done.stdout.splitlines():
        if line.startswith(PREFIX):
            section = json.loads(line[len(PREFIX) :])
            sections[section.pop("section")] = section
    if done.returncode == 0:
        return Probed(sections)
    tail = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    return Probed(sections, f"exit status {done.returncode}: {tail}")
