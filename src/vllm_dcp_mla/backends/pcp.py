"""PCP with DCP, with the series of vLLM that it is served with; elsewhere nothing is added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..compat.releases import installed_release

__all__ = ["GatherBuilderMixin", "GatherFields", "PcpGatherMixin"]


class _NoGather:
    gather_rows = 0

    def _init_gather(self) -> None:
        """PCP with DCP was refused when vLLM selected."""


class _StockBuilder:
    def settle_gather(self) -> None:
        """Nothing is gathered."""


@dataclass(kw_only=True)
class _NoFields:
    pass


PcpGatherMixin: Any = _NoGather
GatherBuilderMixin: Any = _StockBuilder
GatherFields: Any = _NoFields

if installed_release().gathers_here:
    from . import gather, gather_metadata

    PcpGatherMixin = gather.PcpGatherMixin
    GatherBuilderMixin = gather_metadata.GatherBuilderMixin
    GatherFields = gather_metadata.GatherFields
