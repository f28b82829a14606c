"""The metadata builder of the DeepSeek-V3.2 indexer under DCP: stock's, with its chunks ours."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.mla.indexer import (
    DeepseekV32IndexerBackend,
    DeepseekV32IndexerMetadata,
    DeepseekV32IndexerMetadataBuilder,
)

from ..settings import load_settings
from ..warmup import warm
from . import scope
from .chunk_kernel import CHUNK_BOUNDS_KERNEL
from .exchange import bound_chunks, max_rows
from .lengths import local_lengths


class DcpIndexerBuilder(DeepseekV32IndexerMetadataBuilder):
    """Serves GLM-5.x and DeepSeek-V3.2 under DCP; for every other engine it is stock's builder."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.serves_dcp = scope.serves(self.vllm_config)
        if not self.serves_dcp:
            return
        settings = load_settings(self.vllm_config.additional_config)
        topk = self.vllm_config.model_config.hf_text_config.index_topk
        self._max_exchange_rows = max_rows(settings.merge_limit_bytes, topk, self.dcp_world_size)
        # An empty schedule: every slot starts where it ends.
        self._no_work = torch.zeros_like(self.scheduler_metadata_buffer)
        warm(self.vllm_config, self.device, CHUNK_BOUNDS_KERNEL, self.compress_ratio)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> DeepseekV32IndexerMetadata:
        """Stock's metadata.

        Raises:
            ValueError: a block table wider than the buffer it is copied to.
        """
        if not self.serves_dcp:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        width = common_attn_metadata.block_table_tensor.shape[1]
        expected = self.expanded_block_table_buffer.shape[1]
        if width > expected:
            raise ValueError(
                f"rank {self.dcp_rank}: the indexer got a block table of {width} blocks a request, "
                f"but was made for {expected} (max_model_len "
                f"{self.vllm_config.model_config.max_model_len}, dcp {self.dcp_world_size}); it "
                "would lose the last ones. Please report this with the vLLM version."
            )
        with scope.building(self._no_work, *self._leading_empty(common_attn_metadata)):
            return super().build(common_prefix_len, common_attn_metadata, fast_build)

    def _leading_empty(self, common: Any) -> tuple[int, int]:
        """How many requests, and query tokens of them, come before the first with keys here."""
        lengths = common.seq_lens_cpu_upper_bound
        drafts = self.vllm_config.speculative_config
        # With adaptive verification the host does not know which request a query row is of.
        if lengths is None or (drafts is not None and drafts.enable_adaptive_verification):
            return 0, 0
        # A rank stores something of every request that is longer than its first turn begins.
        holds = lengths > self.dcp_rank * self.cp_kv_cache_interleave_size
        if not bool(holds.any()):
            return len(lengths), common.num_actual_tokens  # the padding of a graph included
        requests = int(holds.int().argmax())
        return requests, int(common.query_start_loc_cpu[requests])

    def _prefill_split_seq_lens(self, seq_lens_cpu: torch.Tensor) -> torch.Tensor:
        """The lengths that chunks are budgeted by: what the fullest rank stores of each request.

        Logits and gathered keys of a chunk are local to a rank; stock budgets them as if a rank had
        all keys, and makes ``dcp`` times as many chunks, each with its collective.
        """
        if not self.serves_dcp:
            return super()._prefill_split_seq_lens(seq_lens_cpu)
        return local_lengths(
            seq_lens_cpu, 0, self.dcp_world_size, self.compressed_cp_interleave_size
        )

    def _split_indexer_prefill_chunks(self, *args: Any, **kwargs: Any) -> list[tuple[slice, slice]]:
        chunks = DeepseekV32IndexerMetadataBuilder._split_indexer_prefill_chunks(*args, **kwargs)
        # With PCP the rows of a chunk see all keys, and exchange no candidates.
        if not self.serves_dcp or self.use_pcp:
            return chunks
        return bound_chunks(chunks, self._max_exchange_rows)


class DcpIndexerBackend(DeepseekV32IndexerBackend):
    """Stock's indexer backend with our builder; its name stays stock's."""

    @staticmethod
    def get_builder_cls() -> type[DcpIndexerBuilder]:
        """The builder vLLM makes for the indexer's layers."""
        return DcpIndexerBuilder
