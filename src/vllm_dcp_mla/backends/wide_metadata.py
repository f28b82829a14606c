"""Prefill from an fp8 cache on Hopper: which keys are widened to bf16, and where to.

They go where vLLM's builder gathers the context of dense prefills: a step whose prefills attend
sparsely has no other use for that memory. What is copied follows from host lengths. Requests that
do not fit, and those too short for it to pay, are attended from the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import max_decode_query_len
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

from ..gather_plan import PAGE_ROWS, plan_chunks
from ..kernel_choice import widens

logger = init_logger("vllm.dcp_mla.hopper")


@dataclass(frozen=True, slots=True)
class WideChunk:
    """Requests whose rows are copied together, and the tokens that attend the copy.

    Attributes:
        tokens: as a slice of the step's.
        table: ``[requests, width]`` int32, the blocks of each.
        owners: ``[copied blocks]`` int32, the request of each block of the copy.
        firsts: ``[requests]`` int32, the first block of each request in the copy.
    """

    tokens: slice
    table: torch.Tensor
    owners: torch.Tensor
    firsts: torch.Tensor


@dataclass(slots=True)
class WideStep:
    """Where a step's keys may be widened to, and which are.

    Attributes:
        memory: ``[pages, 64, D]`` bf16.
        chunks: in order; tokens of none attend the cache. Empty where PCP gathers keys.
        one_block: ``[1]`` int32, a 0: gathered keys are block 0 of request 0; None elsewhere.
    """

    memory: torch.Tensor
    chunks: list[WideChunk] = field(default_factory=list)
    one_block: torch.Tensor | None = None
    _moved: dict[int, torch.Tensor] = field(default_factory=dict)

    def moved(self, num_blocks: int) -> torch.Tensor:
        """``[num_blocks]`` int32 for the places of blocks, made by the first layer that asks."""
        if num_blocks not in self._moved:
            # Whatever row is asked for, it is one of the copy.
            self._moved[num_blocks] = torch.zeros(
                num_blocks, dtype=torch.int32, device=self.memory.device
            )
        return self._moved[num_blocks]


@dataclass(kw_only=True)
class WideFields:
    """What is added to vLLM's metadata; ``wide`` is None where nothing may be widened."""

    wide: WideStep | None = None


class WideKeysBuilderMixin:
    """Adds what is widened to a builder of vLLM whose metadata has :class:`WideFields`."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        layers = self.vllm_config.compilation_config.static_forward_context
        self._widens = layers[self.layer_names[0]].impl.widens_keys
        if not self._widens:
            return
        rows = self.chunked_prefill_workspace
        pages = len(rows) // PAGE_ROWS
        self._memory = rows[: pages * PAGE_ROWS].view(pages, PAGE_ROWS, -1)
        self._one_block = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._decode_query_len = max_decode_query_len(self.vllm_config)
        if self.use_pcp:  # keys are widened once the rows of all ranks are gathered
            self.most_together = pages * PAGE_ROWS // self.dcp_world_size
        ranks = 1 if self.use_pcp else self.dcp_world_size
        logger.info_once(
            "Prefills attend keys of an fp8 cache widened to bf16, %s tokens of context at a time, "
            "and those of more as they are cached.",
            f"{pages * PAGE_ROWS * ranks:,}",
        )

    def build(
        self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """Stock's metadata, and which keys of its prefills are widened."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]
        # Dense prefill needs the memory itself.
        dense = metadata.prefill is not None and metadata.prefill.use_dense_mha
        if not self._widens or dense:
            return metadata
        if self.use_pcp:
            if metadata.num_prefills:
                metadata.wide = WideStep(self._memory, one_block=self._one_block)
        elif common_attn_metadata.max_query_len > self._decode_query_len:
            chunks = plan_widening(
                common_attn_metadata,
                metadata,
                len(self._memory) * PAGE_ROWS,
                decode_query_len=self._decode_query_len,
                dcp=self.dcp_world_size,
                device=self.device,
            )
            if chunks:
                metadata.wide = WideStep(self._memory, chunks)
        return metadata


def plan_widening(
    common: Any,
    metadata: Any,
    num_rows: int,
    *,
    decode_query_len: int,
    dcp: int,
    device: torch.device,
) -> list[WideChunk]:
    """The chunks of a step that pay, from host lengths alone.

    vLLM counts prefills of up to 256 tokens among the decodes, which come first; here they are what
    they are. CUDA graphs hold decodes only.

    Args:
        common: vLLM's ``CommonAttentionMetadata``, decodes first.
        metadata: what vLLM's builder made of it.
        num_rows: rows that there is memory for.
        decode_query_len: most tokens of a decode.
        dcp: ranks that share a request's cache.
        device: where the tensors go.
    """
    bounds = common.query_start_loc_cpu.numpy()[: common.num_reqs + 1]
    first = int((np.diff(bounds) > decode_query_len).argmax())
    bounds, block_size = bounds[first:], metadata.block_size
    # The fullest rank's rows: enough for every rank's.
    rows = get_dcp_local_seq_lens(
        common.seq_lens_cpu_upper_bound[first : common.num_reqs],
        *(dcp, 0, metadata.cp_kv_cache_interleave_size),
    ).numpy()
    blocks = -(-rows // block_size)
    keys = np.diff(bounds) * np.minimum(rows, -(-metadata.topk_tokens // dcp))
    chunks = []
    for plan in plan_chunks(blocks.tolist(), num_rows // block_size, 1):
        some = slice(*plan.requests)
        tokens = slice(int(bounds[some.start]), int(bounds[some.stop]))
        copied = plan.rows_per_rank * block_size
        if not plan.whole or not widens(tokens.stop - tokens.start, int(keys[some].sum()), copied):
            continue
        requests = len(plan.rows)
        owners = np.repeat(np.arange(requests, dtype=np.int32), plan.rows)
        firsts = np.cumsum(plan.rows, dtype=np.int32) - np.array(plan.rows, dtype=np.int32)
        here = async_tensor_h2d(np.concatenate([firsts, owners]), device=device)
        table = metadata.block_table[first:][some]
        chunks.append(WideChunk(tokens, table, here[requests:], here[:requests]))
    return chunks
