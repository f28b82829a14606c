"""The ranks of an engine agree before the first collective of a layer, or stop with a reason.

Symptom without it: a rank that lacks the package, or has other versions or settings, makes other
collectives than its peers, and all hang until a timeout of 300 or 1,800 seconds names nobody.

Every rank of a DCP group says what it is in the store that the group was made with. A PCP group is
part of its DCP group whenever DCP is on. The place is the constructor of the first attention layer:
all ranks have just left the collectives that made their groups, nothing is compiled and no weight
is read yet, and what comes next is the layer's exchange, whose buffers all ranks make together. A
rank is missed once the first that came has waited for :data:`WAIT_S`.

A rank without the package says nothing, and is found by those that have it.
"""

from __future__ import annotations

import logging
import weakref
from contextlib import nullcontext, suppress
from typing import Any

from .differences import harmless_differences, name_ranks, stopping_differences
from .exchange import Answers, collect, leave, publish
from .fingerprint import rank_fingerprint

logger = logging.getLogger("vllm.dcp_mla")

#: Seconds. Between the groups and the first layer lie imports and the reading of configurations.
WAIT_S = 60.0

#: Marks the engine that agreed last: its draft model, made much later, belongs to it.
_engine: weakref.ref[Any] | None = None
#: Checks done with a group, for engines that follow each other in its processes.
_rounds: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class AgreementError(RuntimeError):
    """Ranks are missing or differ; the message names them, the fields and both values."""


def check(vllm_config: Any, *, wait_s: float = WAIT_S, **launch: Any) -> None:
    """Stops the engine where its ranks differ; once an engine, at no cost afterwards.

    Args:
        vllm_config: vLLM's current ``VllmConfig``.
        wait_s: seconds to wait for the other ranks.
        launch: what the backend decided and all ranks must have decided alike, by name.

    Raises:
        AgreementError: ranks are absent, or a field differs.
    """
    global _engine
    if vllm_config.parallel_config.decode_context_parallel_size == 1:
        return
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return  # a process of its own, as a layer that is made to be looked at
    # Configurations of draft models are made from the engine's and keep this part of it.
    engine = vllm_config.compilation_config
    if _engine is not None and _engine() is engine:
        return
    group = parallel_state.get_dcp_group()
    _rounds[group] = number = _rounds.get(group, 0) + 1
    world_rank = parallel_state.get_world_group().rank_in_group
    own = rank_fingerprint(vllm_config, world_rank, launch)
    compare(group, number, own, wait_s)
    _engine = weakref.ref(engine)


def compare(group: Any, number: int, own: dict[str, str], wait_s: float) -> None:
    """Compares this rank with the others of a group.

    Args:
        group: vLLM's ``GroupCoordinator``.
        number: which comparison of this group it is, the same on each rank.
        own: this rank's fingerprint.
        wait_s: seconds to wait for the other ranks.

    Raises:
        AgreementError: as :func:`check` does.
    """
    from torch.distributed import DistError
    from torch.distributed.distributed_c10d import PrefixStore

    # A group's store is its own part of the world's: engines that share a world do not meet.
    store = PrefixStore(f"vllm_dcp_mla/{number}", group.cpu_group.get_group_store())
    try:
        publish(store, group.rank, group.ranks, own, wait_s)
        answers = collect(store, group.ranks)
        problems = _problems(group.rank, answers, wait_s)
        # Where this engine stops, all that mattered has been read: the store may go.
        with suppress(DistError) if problems else nullcontext():
            leave(store, group.rank, group.ranks, answers, agreed=not problems)
    except DistError as error:
        raise AgreementError(
            f"Rank {group.rank} stops: it lost the store of its process group while it compared "
            f"itself with ranks {group.ranks} ({error}). The process that holds the store, rank 0 "
            "as a rule, has ended; look at its log."
        ) from error
    if problems:
        raise AgreementError(
            f"Rank {group.rank} stops: the ranks of its decode context parallel group "
            f"{group.ranks} do not agree, and would hang in their first exchange.\n"
            + "\n".join(f"- {problem}" for problem in problems)
        )
    for sentence in harmless_differences(answers):
        logger.warning("%s All ranks tune again; the start takes longer.", sentence)


def _problems(rank: int, answers: Answers, wait_s: float) -> list[str]:
    problems = []
    if rank in answers.absent:
        problems.append(
            f"Rank {rank}, this one, came when the others had stopped waiting, {wait_s:.0f} s "
            "after the first. Find out from its log what it did so long."
        )
    others = [other for other in answers.absent if other != rank]
    if others:
        problems.append(
            f"{name_ranks(answers, others).capitalize()} did not come within {wait_s:.0f} s of the "
            "first. There, vllm-dcp-mla is not installed, is off (VLLM_DCP_MLA_DISABLE, "
            "VLLM_PLUGINS without dcp_mla, or its log says why), another plugin or flag chose "
            "another attention backend, or the rank died. Look at its log, and run "
            "`vllm-dcp-mla doctor` on its machine in its environment."
        )
    differing = stopping_differences(answers)
    if differing:
        problems += differing
        problems.append("Give all ranks the same versions, flags and environment.")
    return problems
