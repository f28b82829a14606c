"""vLLM's KV budget and what it means for ``--gpu-memory-utilization``: arithmetic only.

``Worker.determine_available_memory``: ``ceil(total * utilization) - non-KV peak - CUDA graphs``.
All that is allocated after profiling comes out of ``total * (1 - utilization)`` instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: vLLM rounds the utilisations that it suggests to this many places.
PLACES = 4


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory of one GPU.

    Attributes:
        total_bytes: all of it.
        utilization: ``--gpu-memory-utilization``.
        non_kv_bytes: what memory profiling counts: weights, buffers, the peak of a dummy step.
        graphs_bytes: vLLM's estimate of its CUDA graphs.
        outside_bytes: what is needed beside the requested share, at its worst moment.
    """

    total_bytes: int
    utilization: float
    non_kv_bytes: int
    graphs_bytes: int = 0
    outside_bytes: int = 0

    @property
    def requested_bytes(self) -> int:
        """The share of the GPU that vLLM plans with."""
        return math.ceil(self.total_bytes * self.utilization)

    @property
    def kv_bytes(self) -> int:
        """What is left for the KV cache; may be negative."""
        return self.requested_bytes - self.non_kv_bytes - self.graphs_bytes

    @property
    def slack_bytes(self) -> int:
        """What vLLM leaves of the GPU."""
        return self.total_bytes - self.requested_bytes

    @property
    def free_bytes(self) -> int:
        """What stays free at the worst moment; negative means out of memory."""
        return self.slack_bytes - self.outside_bytes

    @property
    def max_safe_utilization(self) -> float:
        """The largest utilisation that leaves room for what is outside, rounded down."""
        share = 1 - self.outside_bytes / self.total_bytes
        return max(math.floor(share * 10**PLACES) / 10**PLACES, 0.0)

    @property
    def largest_utilization(self) -> float | None:
        """The largest safe utilisation; None where even that leaves nothing for a KV cache."""
        safe = self.max_safe_utilization
        return safe if self.utilization_for_any_kv <= safe else None

    @property
    def without_graphs(self) -> float:
        """The utilisation whose budget without graphs equals this one with them."""
        return round(self.utilization - self._graph_share, PLACES)

    @property
    def to_keep_kv(self) -> float:
        """The utilisation that gives the KV budget of before graphs were counted."""
        return min(round(self.utilization + self._graph_share, PLACES), 1.0)

    @property
    def utilization_for_any_kv(self) -> float:
        """The smallest utilisation with a KV budget that is not negative, rounded up."""
        share = (self.non_kv_bytes + self.graphs_bytes) / self.total_bytes
        return math.ceil(share * 10**PLACES) / 10**PLACES

    @property
    def _graph_share(self) -> float:
        return self.graphs_bytes / self.total_bytes
