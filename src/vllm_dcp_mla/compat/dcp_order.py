"""Patch: a rank's number in the DCP group is its place in what the group gathers.

Symptom: wrong answers at DCP = TP x PCP with both above 1, such as TP2 PCP2 DCP4: a rank weighs its
part of the attention by another rank's LSE, and reads keys where another rank's are.
Cause: vLLM lists the group PCP first (ranks 0, 2, 1, 3) and numbers the shards by that list, while
``torch.distributed.new_group`` sorts it, so that collectives go by 0, 1, 2, 3.
Guard: wraps ``init_model_parallel_group``; sorts the lists of the group named ``dcp`` and nothing
else. In every other topology they are sorted already.
Goes away when: vLLM passes ``sort_ranks=False``, or sorts the list itself.
"""

from __future__ import annotations

import functools
from typing import Any

_MARK = "_dcp_mla_sorts_dcp"


def install() -> None:
    """Wraps ``init_model_parallel_group``; calling it again changes nothing.

    Must come before vLLM makes its groups: slot mappings are numbered by them.
    """
    from vllm.distributed import parallel_state

    groups: Any = parallel_state
    stock = groups.init_model_parallel_group
    if hasattr(stock, _MARK):
        return

    @functools.wraps(stock)
    def init_model_parallel_group(group_ranks: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("group_name") == "dcp":
            group_ranks = [sorted(ranks) for ranks in group_ranks]
        return stock(group_ranks, *args, **kwargs)

    setattr(init_model_parallel_group, _MARK, True)
    groups.init_model_parallel_group = init_model_parallel_group
