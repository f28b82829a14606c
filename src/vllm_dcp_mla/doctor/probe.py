"""What a fresh Python process finds, one JSON line a section; run as a program, by its path.

Standard library only, and no import from this package: the process must see the package as vLLM's
processes do, or not see it. A section that breaks ends the process; the lines before it count.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import Distribution, distributions, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

PREFIX = "vllm-dcp-mla probe: "
GROUP = "vllm.general_plugins"
DISTRIBUTION = "vllm-dcp-mla"
PACKAGE = "vllm_dcp_mla"


def _say(section: str, content: dict[str, Any]) -> None:
    print(f"{PREFIX}{json.dumps({'section': section, **content})}", flush=True)


def _normalised(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _source_folder(distribution: Distribution) -> str | None:
    """The folder that a distribution says its package is imported from."""
    direct = json.loads(distribution.read_text("direct_url.json") or "{}")
    if direct.get("dir_info", {}).get("editable"):
        return unquote(urlsplit(str(direct.get("url", ""))).path) or None
    return str(distribution.locate_file(PACKAGE))


def report_metadata() -> None:
    """Entry points of vLLM's plugin group, our distributions, and where the package lies."""
    ours = [
        {
            "metadata": str(getattr(d, "_path", "")),
            "version": d.version,
            "folder": _source_folder(d),
        }
        for d in distributions()
        if _normalised(d.metadata["Name"] or "") == DISTRIBUTION
    ]
    spec = find_spec(PACKAGE)
    _say(
        "metadata",
        {
            "entry_points": [{"name": e.name, "value": e.value} for e in entry_points(group=GROUP)],
            "distributions": ours,
            "imported_from": str(Path(spec.origin).parent) if spec and spec.origin else None,
        },
    )


def report_torch() -> None:
    """Whether torch imports and sees a GPU."""
    import torch

    _say(
        "torch",
        {"cuda_build": torch.version.cuda, "cuda_available": bool(torch.cuda.is_available())},
    )


def report_registry(members: list[str]) -> None:
    """Where vLLM's backend registry points once plugins are loaded as vLLM loads them."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    known = AttentionBackendEnum.__members__
    _say(
        "registry",
        {
            "members": {
                name: {
                    "path": known[name].get_path(),
                    "overridden": known[name].is_overridden(),
                }
                for name in members
                # A placeholder that nobody has registered has no path.
                if name in known and (known[name].value or known[name].is_overridden())
            }
        },
    )


if __name__ == "__main__":
    if sys.argv[1] == "metadata":
        report_metadata()
    else:
        report_torch()
        if find_spec("vllm") is not None:
            report_registry(sys.argv[2:])
