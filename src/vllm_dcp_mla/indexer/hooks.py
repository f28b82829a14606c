"""Patches of vLLM's indexer modules.

Which engines: DCP, and a model of the package ``vllm.models.deepseek_v32`` (GLM-5.x, DeepSeek-V3.2
and their MTP layers). All others run stock's code, in the same process too.

1. ``deepseek_v2.DeepseekV32IndexerBackend``: the name that ``DeepseekV32IndexerCache`` answers vLLM
   with. Symptom: 2 GPU-CPU synchronisations a prefill chunk, late compiles that stall collectives,
   gigabytes for the exchange of candidates. Cause: what stock's builder does under DCP. Guard: the
   builder asks :func:`.scope.serves` and is stock's where the answer is no.
2. ``indexer.build_prefill_chunk_metadata`` and ``indexer.get_paged_mqa_logits_metadata``: module
   globals that stock's ``build()`` calls, shared with other models' builders. Guard: they do what
   they did unless one of our builds is running (:class:`.scope.Running`).
   With vLLM 0.29 also the module's ``split_indexer_prefill_chunks``, a method since.
3. ``BuildPrefillChunkMetadataKernel.get_warmup_keys``: stock's variants of the replaced kernel are
   not compiled. Guard: only for engines that :func:`.scope.serves` names.

They go away when vLLM's builder takes its totals from host lengths, its chunk kernel specialises on
nothing that varies, and its chunks bound the exchange.
"""

from __future__ import annotations

import functools
import logging
import sys
from typing import TYPE_CHECKING, Any

from ..compat.adapter import load_adapter
from . import scope

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.dcp_mla")

_MARK = "_dcp_mla_dispatches"


def install() -> None:
    """Applies the patches; calling it again changes nothing.

    A process that has not imported the models has no indexer to serve.
    """
    deepseek_v2: Any = sys.modules.get("vllm.model_executor.models.deepseek_v2")
    if deepseek_v2 is None:
        return
    from vllm.v1.attention.backends.mla import indexer

    from .builder import DcpIndexerBackend

    if hasattr(indexer.build_prefill_chunk_metadata, _MARK):
        return
    found = deepseek_v2.DeepseekV32IndexerBackend
    if found is not indexer.DeepseekV32IndexerBackend:
        logger.warning(
            "The indexer's backend is already replaced by %s.%s and is left alone; DCP runs with "
            "its metadata. Uninstall one of the two plugins, or name one in VLLM_PLUGINS.",
            found.__module__,
            found.__qualname__,
        )
        return
    deepseek_v2.DeepseekV32IndexerBackend = DcpIndexerBackend
    _dispatch_chunks(indexer)
    _dispatch_schedule(indexer)
    _drop_stock_variants(indexer)
    load_adapter().install_indexer_hooks(indexer)


def _dispatch_chunks(indexer: Any) -> None:
    stock = indexer.build_prefill_chunk_metadata

    @functools.wraps(stock)
    def build_prefill_chunk_metadata(*args: Any, **kwargs: Any) -> Any:
        running = scope.running()
        if running is None:
            return stock(*args, **kwargs)
        return running.chunk_metadata(*args, **kwargs)

    setattr(build_prefill_chunk_metadata, _MARK, True)
    indexer.build_prefill_chunk_metadata = build_prefill_chunk_metadata


def _dispatch_schedule(indexer: Any) -> None:
    from vllm.utils.deep_gemm import _paged_mqa_logits_schedule_slots

    stock = indexer.get_paged_mqa_logits_metadata

    @functools.wraps(stock)
    def get_paged_mqa_logits_metadata(
        context_lens: torch.Tensor, block_size: int, num_sms: int, **kwargs: Any
    ) -> torch.Tensor:
        running = scope.running()
        if running is None or not running.schedules_nothing(context_lens):
            return stock(context_lens, block_size, num_sms, **kwargs)
        next_n = context_lens.shape[1] if context_lens.dim() == 2 else 1
        return running.no_work[: _paged_mqa_logits_schedule_slots(num_sms, next_n) + 1]

    indexer.get_paged_mqa_logits_metadata = get_paged_mqa_logits_metadata


def _drop_stock_variants(indexer: Any) -> None:
    kernel = indexer.BuildPrefillChunkMetadataKernel
    stock = kernel.get_warmup_keys

    @functools.wraps(stock)
    def get_warmup_keys(self: Any, vllm_config: Any) -> Any:
        return [] if scope.serves(vllm_config) else stock(self, vllm_config)

    kernel.get_warmup_keys = get_warmup_keys
