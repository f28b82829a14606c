"""Sparse MLA attention with decode context parallelism for stock vLLM.

The names below are loaded on first use: importing the package touches neither torch nor vLLM.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "check_topology": "topology",
    "combine_partials": "merge",
    "gathered_heads": "topology",
    "local_seq_len": "topology",
    "local_seq_lens": "topology",
    "plan_workspace": "workspace",
    "softmax_stats_bytes": "workspace",
    "stock_workspace_bytes": "workspace",
    "WorkspacePlan": "workspace",
}
__all__ = ["__version__", *sorted(_HOME)]

if TYPE_CHECKING:
    from .merge import combine_partials as combine_partials
    from .topology import check_topology as check_topology
    from .topology import gathered_heads as gathered_heads
    from .topology import local_seq_len as local_seq_len
    from .topology import local_seq_lens as local_seq_lens
    from .workspace import WorkspacePlan as WorkspacePlan
    from .workspace import plan_workspace as plan_workspace
    from .workspace import softmax_stats_bytes as softmax_stats_bytes
    from .workspace import stock_workspace_bytes as stock_workspace_bytes


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
