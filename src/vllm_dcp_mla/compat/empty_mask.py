"""Patch: vLLM 0.29's mask of empty shards with lengths of no sequence at all.

Symptom: a rank without sequences, as in a warm-up of decodes alone, indexes an empty tensor.
Cause: ``mask_dcp_empty_shards_`` clamps the sequence of a row to the last one, -1 of none.
Guard: wraps it once, where stock does not handle it; only a call with lengths of zero sequences
differs, whose rows are all empty.
Goes away with: 0.29; 0.30 returns early.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from .releases import installed_release

_MARK = "_dcp_mla_masks_no_sequences"


def install() -> None:
    """Wraps ``mask_dcp_empty_shards_`` where stock needs it; calling it again changes nothing."""
    dcp: Any = sys.modules.get("vllm.v1.attention.ops.dcp")
    if dcp is None or installed_release().masks_no_sequences:
        return
    stock = dcp.mask_dcp_empty_shards_
    if hasattr(stock, _MARK):
        return

    @functools.wraps(stock)
    def mask(lse: Any, seq_lens: Any, query_start_loc: Any) -> None:
        if seq_lens is not None and query_start_loc is not None and seq_lens.shape == (0,):
            if query_start_loc.shape != (1,):
                raise ValueError(
                    f"query_start_loc has the shape {tuple(query_start_loc.shape)}; of no sequence "
                    "it holds one boundary"
                )
            lse.fill_(float("-inf"))
            return
        stock(lse, seq_lens, query_start_loc)

    setattr(mask, _MARK, True)
    dcp.mask_dcp_empty_shards_ = mask
