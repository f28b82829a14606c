"""The metadata builder of the DeepSeek-V3.2 indexer under DCP: stock's, with its chunks ours."""

from __future__ import annotations

from typing import Any
from weakref import WeakMethod

import torch
from vllm.v1.attention.backends.mla.indexer import (
    DeepseekV32IndexerBackend,
    DeepseekV32IndexerMetadata,
    DeepseekV32IndexerMetadataBuilder,
)

from ..compat import pcp_drafts
from ..compat.adapter import load_adapter
from ..compat.releases import installed_release
from ..settings import load_settings
from ..warmup import warm
from . import scope
from .chunk_kernel import CHUNK_BOUNDS_KERNEL
from .exchange import bound_chunks, max_rows
from .length_kernel import LOCAL_LENGTHS_KERNEL, write_local_lengths
from .lengths import local_lengths

_Hook: Any = load_adapter().IndexerHook


class DcpIndexerBuilder(_Hook, DeepseekV32IndexerMetadataBuilder):
    """Serves GLM-5.x and DeepSeek-V3.2 under DCP; for every other engine it is stock's builder."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.serves_dcp = scope.serves(self.vllm_config)
        if not self.serves_dcp:
            return
        if installed_release().gathers_here:
            # The runner has made its drafter by now, and not yet the drafter's graphs.
            pcp_drafts.install()
        settings = load_settings(self.vllm_config.additional_config)
        topk = self.vllm_config.model_config.hf_text_config.index_topk
        self._max_exchange_rows = max_rows(settings.merge_limit_bytes, topk, self.dcp_world_size)
        # An empty schedule: every slot starts where it ends.
        self._no_work = torch.zeros_like(self.scheduler_metadata_buffer)
        self._running = scope.Running(WeakMethod(self.split_prefills), self._no_work)
        self._table_width = self.expanded_block_table_buffer.shape[1]
        # A rank stores something of every request that is longer than its first turn begins.
        self._begins = self.dcp_rank * self.cp_kv_cache_interleave_size
        # With adaptive verification the host does not know which request a query row is of.
        drafts = self.vllm_config.speculative_config
        self._knows_rows = drafts is None or not drafts.enable_adaptive_verification
        warm(self.vllm_config, self.device, CHUNK_BOUNDS_KERNEL, self.compress_ratio)
        warm(self.vllm_config, self.device, LOCAL_LENGTHS_KERNEL)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> DeepseekV32IndexerMetadata:
        """Stock's metadata.

        Raises:
            ValueError: a block table wider than the buffer it is copied to.
        """
        if not self.serves_dcp:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        width = common_attn_metadata.block_table_tensor.size(1)
        if width > self._table_width:
            raise ValueError(
                f"rank {self.dcp_rank}: the indexer got a block table of {width} blocks a request, "
                f"but was made for {self._table_width} (max_model_len "
                f"{self.vllm_config.model_config.max_model_len}, dcp {self.dcp_world_size}); it "
                "would lose the last ones. Please report this with the vLLM version."
            )
        running = self._running
        running.empty_requests, running.empty_tokens = self._leading_empty(common_attn_metadata)
        with running:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)

    def _dcp_localize_decode_seq_lens(
        self, seq_lens: torch.Tensor, num_decodes: int, seq_lens_is_buffer_view: bool
    ) -> torch.Tensor:
        """Stock's decode bounds of this rank, in one launch.

        Args:
            seq_lens: global bounds of decode rows, int32.
            num_decodes: requests.
            seq_lens_is_buffer_view: whether they lie in a buffer of the builder, and may change.
        """
        if not self.serves_dcp:
            stock = super()._dcp_localize_decode_seq_lens
            unchanged: torch.Tensor = stock(seq_lens, num_decodes, seq_lens_is_buffer_view)
            return unchanged
        # A CUDA graph keeps the buffer's address.
        out = seq_lens if seq_lens_is_buffer_view else self.decode_seq_lens_buffer[:num_decodes]
        write_local_lengths(
            seq_lens,
            out,
            rank=self.dcp_rank,
            dcp=self.dcp_world_size,
            interleave=self.cp_kv_cache_interleave_size,
        )
        return out

    def _leading_empty(self, common: Any) -> tuple[int, int]:
        """How many requests, and query tokens of them, come before the first with keys here."""
        lengths = common.seq_lens_cpu_upper_bound
        if lengths is None or not self._knows_rows:
            return 0, 0
        lengths = lengths.numpy()  # quicker to look at than a tensor
        if lengths.size and lengths[0] > self._begins:  # nearly always
            return 0, 0
        holds = lengths > self._begins
        if not holds.any():
            return lengths.size, common.num_actual_tokens  # the padding of a graph included
        requests = int(holds.argmax())
        return requests, int(common.query_start_loc_cpu[requests])

    def split_prefills(
        self, stock: Any, seq_lens_cpu: torch.Tensor, *args: Any, **kwargs: Any
    ) -> list[tuple[slice, slice]]:
        """Stock's chunks of prefills, each with its query rows, within what a rank stores.

        Logits and gathered keys of a chunk are local to a rank; stock budgets them as if a rank had
        all keys, and makes ``dcp`` times as many chunks, each with its collective. Here the lengths
        are what the fullest rank stores of each request.

        Args:
            stock: splits by what it is given.
            seq_lens_cpu: ``[prefills]`` compressed lengths.
            args, kwargs: what else stock is given.
        """
        interleave = self.cp_kv_cache_interleave_size // self.compress_ratio
        local = local_lengths(seq_lens_cpu, 0, self.dcp_world_size, interleave)
        return bound_chunks(stock(local, *args, **kwargs), self._max_exchange_rows)


class DcpIndexerBackend(DeepseekV32IndexerBackend):
    """Stock's indexer backend with our builder; its name stays stock's."""

    @staticmethod
    def get_builder_cls() -> type[DcpIndexerBuilder]:
        """The builder vLLM makes for the indexer's layers."""
        return DcpIndexerBuilder
