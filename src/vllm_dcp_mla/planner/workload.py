"""The sizes that ``vllm serve`` is told, beside the topology."""

from __future__ import annotations

from dataclasses import dataclass

_LONG_CONTEXT = 256 * 1024


@dataclass(frozen=True, slots=True)
class Workload:
    """vLLM's flags of the same names.

    Attributes:
        max_num_batched_tokens: most tokens of a step; buffers use it whatever ``pcp`` is.
        max_model_len: most tokens of a request.
        max_num_seqs: most requests of a step.
        block_size: tokens of a cache block on a rank.
        spec_tokens: ``num_speculative_tokens`` of the MTP drafter, 0 for none.
    """

    max_num_batched_tokens: int
    max_model_len: int
    max_num_seqs: int
    block_size: int
    spec_tokens: int

    @property
    def decode_tokens(self) -> int:
        """Tokens of a request in a decode step, its drafts included."""
        return 1 + self.spec_tokens

    @property
    def decode_rows(self) -> int:
        """Most rows of a decode step."""
        return min(self.max_num_batched_tokens, self.max_num_seqs * self.decode_tokens)

    @property
    def prefill_factor(self) -> int:
        """vLLM's ``sparse_mla_prefill_workspace_factor`` where it is not set."""
        return 5 if self.max_model_len <= _LONG_CONTEXT else 2

    def captured_tokens(self, largest_graph: int) -> int:
        """vLLM's ``max_cudagraph_capture_size`` where it is not set."""
        wanted = 2 * self.max_num_seqs * self.decode_tokens
        return min(wanted, largest_graph, self.max_num_batched_tokens)
