"""What this package's attention implementations have in common."""

from __future__ import annotations

from typing import Any

from .. import agreement
from ..compat import a2a
from ..topology import gathered_heads


class DcpImplMixin:
    """Before an implementation of vLLM."""

    # Every token brings its own top-k row, filtered by rank and interleave, and the indexer bounds
    # each token's keys after MTP tokens are expanded: no interleave is special.
    supports_mtp_with_cp_non_trivial_interleave_size = True

    num_heads: int
    kv_cache_dtype: str
    #: Names of the kernels that it launches.
    kernel_names: tuple[str, ...]

    def _kernel_heads(self, config: Any) -> int:
        """Query heads that the kernel of this rank sees in an engine."""
        parallel = config.parallel_config
        return gathered_heads(
            self.num_heads,
            parallel.tensor_parallel_size,
            parallel.prefill_context_parallel_size,
            parallel.decode_context_parallel_size,
        )

    def _join_ranks(self, config: Any, **launch: Any) -> None:
        """Compares this rank with its DCP group, and fits vLLM's exchange for what will be sent.

        Args:
            config: the engine's configuration.
            launch: what else was decided here and all ranks must have decided alike, by name.

        Raises:
            ..agreement.AgreementError: ranks are missing or differ.
        """
        agreement.check(
            config,
            backend=type(self).__name__,
            kernel=" and ".join(self.kernel_names),
            kv_cache_dtype=self.kv_cache_dtype,
            **launch,
        )
        a2a.install()
