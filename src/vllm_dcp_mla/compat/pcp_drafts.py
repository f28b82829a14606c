"""Patch: under PCP an MTP drafter's first pass runs without CUDA graphs.

Symptom: with MTP and piecewise graphs an engine stops while it starts, "CUDA error: invalid
argument" in the indexer's gather of keys. With full graphs it starts, and drafts come from block
tables and slots that no step fills.
Cause: the runner captures the target with its PCP manager and the drafter's first pass without.
That pass gets slots of one rank's tokens where all ranks' are cached, so that a prefill caches no
key: a launch of no thread blocks. A step then brings the rank's own tokens at other addresses.
Guard: wraps ``TargetDependentARSpeculator.init_cudagraph_manager``; engines with both PCP and DCP
get a manager of no graphs for that pass. The target and later drafts keep theirs.
Goes away when: ``SpeculatorCudaGraphManager.capture`` takes the PCP manager, as the target's does.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

_MODULE = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator"
_MARK = "_dcp_mla_drafts_without_graphs"


def install() -> None:
    """Wraps ``init_cudagraph_manager``; calling it again changes nothing.

    A process that has not imported vLLM's drafters has none.
    """
    module: Any = sys.modules.get(_MODULE)
    if module is None:
        return
    speculator = module.TargetDependentARSpeculator
    stock = speculator.init_cudagraph_manager
    if hasattr(stock, _MARK):
        return

    @functools.wraps(stock)
    def init_cudagraph_manager(self: Any, cudagraph_mode: Any) -> None:
        stock(self, cudagraph_mode)
        parallel = self.vllm_config.parallel_config
        if parallel.prefill_context_parallel_size > 1 and parallel.decode_context_parallel_size > 1:
            made = self.prefill_cudagraph_manager
            self.prefill_cudagraph_manager = type(made)(
                self.vllm_config,
                self.device,
                type(cudagraph_mode).NONE,
                made.decode_query_len,
            )

    setattr(init_cudagraph_manager, _MARK, True)
    speculator.init_cudagraph_manager = init_cudagraph_manager
