"""Patch: vLLM's all-to-all exchange with lengths of no sequence at all.

Symptom: a rank without sequences hands over LSEs by a length that lies before the tensor.
Cause: the fused pack kernel clamps the sequence of a row to the last one, which is -1 of none.
Guard: wraps ``_dcp_a2a_pack_send`` once; only a call with lengths of zero sequences differs, whose
rows are all empty. vLLM 0.33 passes no lengths where the exchange serves this package (without PCP)
and takes no all-to-all with PCP, so that nothing there reaches it.
Goes away when: the kernel's caller handles zero sequences, as the eager mask does.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

_MARK = "_dcp_mla_handles_no_sequences"


def install() -> None:
    """Wraps ``_dcp_a2a_pack_send``; calling it again changes nothing."""
    dcp: Any = sys.modules.get("vllm.v1.attention.ops.dcp")
    if dcp is None or hasattr(dcp._dcp_a2a_pack_send, _MARK):
        return
    stock = dcp._dcp_a2a_pack_send

    @functools.wraps(stock)
    def pack_send(
        out: Any, lse: Any, *args: Any, seq_lens: Any = None, query_start_loc: Any = None
    ) -> None:
        if seq_lens is not None and query_start_loc is not None and seq_lens.shape[0] == 0:
            lse, seq_lens, query_start_loc = lse.new_full(lse.shape, float("-inf")), None, None
        stock(out, lse, *args, seq_lens=seq_lens, query_start_loc=query_start_loc)

    setattr(pack_send, _MARK, True)
    dcp._dcp_a2a_pack_send = pack_send
