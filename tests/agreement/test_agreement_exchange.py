"""Ranks that compare themselves: real processes, a real TCPStore, gloo groups."""

import os
import threading
import time

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from agreement_ranks import (  # noqa: E402
    OWN,
    connect,
    free_port,
    keys_left,
    make_group,
    on_ranks,
    say,
)

from vllm_dcp_mla.agreement import exchange  # noqa: E402
from vllm_dcp_mla.selftest import world  # noqa: E402

HINT = "- Give all ranks the same versions, flags and environment."


def headline(rank, ranks):
    return (
        f"Rank {rank} stops: the ranks of its decode context parallel group {ranks} do not agree, "
        "and would hang in their first exchange."
    )


def absent(who, wait_s):
    return (
        f"- {who} did not come within {wait_s} s of the first. There, vllm-dcp-mla is not "
        "installed, is off (VLLM_DCP_MLA_DISABLE, VLLM_PLUGINS without dcp_mla, or its log says "
        "why), another plugin or flag chose another attention backend, or the rank died. Look at "
        "its log, and run `vllm-dcp-mla doctor` on its machine in its environment."
    )


def agreeing(rank, num_ranks):
    group = make_group(rank, list(range(num_ranks)))
    results = [say(group, number) for number in (1, 2)]
    dist.barrier()
    return results, keys_left()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_equal_ranks_go_on_and_leave_no_keys(num_ranks):
    assert on_ranks(num_ranks, agreeing) == [([None, None], [])] * num_ranks


def one_missing(rank, num_ranks, missing):
    group = make_group(rank, list(range(num_ranks)))
    return None if rank == missing else say(group, wait_s=1.0)


@pytest.mark.parametrize(("num_ranks", "missing"), [(2, 0), (2, 1), (4, 2)])
def test_a_rank_that_never_comes_is_named_by_all_others(num_ranks, missing):
    texts = on_ranks(num_ranks, one_missing, missing)
    for rank, text in enumerate(texts):
        if rank == missing:
            assert text is None
        else:
            wanted = [headline(rank, list(range(num_ranks))), absent(f"Rank {missing}", 1)]
            assert text.splitlines() == wanted


def one_late(rank, num_ranks):
    group = make_group(rank, list(range(num_ranks)))
    if rank == 3:
        dist.distributed_c10d._get_default_store().get("given up")
    text = say(group, wait_s=0.5)
    if rank == 0:
        dist.distributed_c10d._get_default_store().set("given up", "1")
    return text


def test_a_rank_that_comes_late_does_not_go_on_alone():
    texts = on_ranks(4, one_late)
    assert all(absent("Rank 3", 0) in text for text in texts[:3])
    late = (
        "- Rank 3, this one, came when the others had stopped waiting, 0 s after the first. Find "
        "out from its log what it did so long."
    )
    assert texts[3].splitlines() == [headline(3, [0, 1, 2, 3]), late]


def one_different(rank, num_ranks, changes):
    group = make_group(rank, list(range(num_ranks)))
    return say(group, **changes.get(rank, {}))


@pytest.mark.parametrize(
    ("num_ranks", "changes", "sentences"),
    [
        (
            2,
            {1: {"VLLM_USE_DIRECT_DCP_A2A": "False"}},
            ["- VLLM_USE_DIRECT_DCP_A2A: unset on rank 0; False on rank 1."],
        ),
        (
            4,
            {2: {"vllm": "0.33.1"}},
            ["- vllm: 0.33.0 on ranks 0, 1, 3; 0.33.1 on rank 2."],
        ),
        (
            4,
            {0: {"heads": "32"}, 3: {"heads": "16", "vllm": "0.33.1"}},
            [
                "- vllm: 0.33.0 on ranks 0, 1, 2; 0.33.1 on rank 3.",
                "- heads: 32 on rank 0; 64 on ranks 1, 2; 16 on rank 3.",
            ],
        ),
        # A release of this package that reports something more; ranks on two machines.
        (
            2,
            {1: {"new": "1", "host": "b"}},
            ["- new: not reported on rank 0 (a); 1 on rank 1 (b)."],
        ),
    ],
)
def test_each_difference_is_named_with_both_values(num_ranks, changes, sentences):
    texts = on_ranks(num_ranks, one_different, changes)
    for rank, text in enumerate(texts):
        assert text.splitlines() == [headline(rank, list(range(num_ranks))), *sentences, HINT]


def test_other_machines_and_autotune_caches_stop_nothing():
    changes = {1: {"host": "b", "FlashInfer autotune cache": "there"}}
    assert on_ranks(2, one_different, changes) == [None, None]


def missing_and_different(rank, num_ranks):
    group = make_group(rank, list(range(num_ranks)))
    return None if rank >= 2 else say(group, wait_s=1.0, heads=str(rank))


def test_absent_and_different_ranks_are_named_in_one_error():
    texts = on_ranks(4, missing_and_different)
    assert texts[1].splitlines() == [
        headline(1, [0, 1, 2, 3]),
        absent("Ranks 2, 3", 1),
        "- heads: 0 on rank 0; 1 on rank 1.",
        HINT,
    ]


def two_engines(rank, num_ranks):
    groups = [make_group(rank, ranks) for ranks in ([0, 1], [2, 3])]
    return say(groups[rank // 2], heads=str(rank // 2))


def test_two_engines_of_one_world_do_not_meet():
    assert on_ranks(4, two_engines) == [None] * 4


def engine_after_engine(rank, num_ranks):
    ranks = list(range(num_ranks))
    group = make_group(rank, ranks)
    # The first stops and leaves its keys; another of the same group, and one of a new group, start.
    texts = [say(group, 1, heads=str(rank)), say(group, 2, vllm="0.33.1")]
    texts.append(say(make_group(rank, ranks), 1))
    return texts


def test_an_engine_does_not_read_what_another_left():
    for rank, (first, *others) in enumerate(on_ranks(2, engine_after_engine)):
        assert first.splitlines()[0] == headline(rank, [0, 1])
        assert others == [None, None]


def holder_dies(rank, num_ranks, folder, port):
    connect(rank, num_ranks, port)
    group = make_group(rank, [0, 1])
    if rank == 0:
        # Its result is sent before the process, and the store with it, goes.
        threading.Timer(1.0, os._exit, [0]).start()
        return None
    return say(group)


def test_a_rank_that_took_the_store_with_it_is_named():
    text = world.run_ranks(2, holder_dies, free_port(), timeout_s=60)[1]
    assert text.startswith(
        "Rank 1 stops: it lost the store of its process group while it compared itself with ranks "
        "[0, 1] ("
    )
    assert text.endswith(
        "The process that holds the store, rank 0 as a rule, has ended; look at its log."
    )


def holder_stops_first(rank, num_ranks, folder, port):
    from vllm_dcp_mla import agreement

    connect(rank, num_ranks, port)
    group = make_group(rank, [0, 1, 2])
    if rank == 1:  # slow to read what the others said
        read = agreement.collect
        agreement.collect = lambda *args: time.sleep(1) or read(*args)
    return say(group, heads=str(rank))  # and the process ends


def test_a_rank_that_stops_waits_until_the_others_have_read_why():
    texts = world.run_ranks(3, holder_stops_first, free_port(), timeout_s=60)
    for rank, text in enumerate(texts):
        wanted = [headline(rank, [0, 1, 2]), "- heads: 0 on rank 0; 1 on rank 1; 2 on rank 2."]
        assert text.splitlines() == [*wanted, HINT]


def store_goes_early(rank, num_ranks, folder, port):
    from vllm_dcp_mla import agreement

    connect(rank, num_ranks, port)
    group = make_group(rank, [0, 1])
    if rank == 0:
        exchange._LINGER_S = 0
    pause = 0.5 if rank == 0 else 1.5  # both have read what was said before the store goes
    agreement.leave = lambda *args, **kwargs: time.sleep(pause) or exchange.leave(*args, **kwargs)
    return say(group, heads=str(rank))  # and the process ends


def test_a_rank_that_knows_why_needs_the_store_no_more():
    texts = world.run_ranks(2, store_goes_early, free_port(), timeout_s=60)
    assert all("- heads: 0 on rank 0; 1 on rank 1." in text for text in texts)


def patient_rank(rank, num_ranks):
    group = make_group(rank, list(range(num_ranks)))
    return None if rank == 2 else say(group, wait_s=1.0 if rank == 0 else 600.0)


def test_the_first_that_gives_up_gives_up_for_all():
    texts = on_ranks(3, patient_rank)
    assert all("- Rank 2 did not come" in text for text in texts[:2])


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_a_rank_that_comes_while_another_gives_up_is_not_left_alone(kind, tmp_path):
    store = dist.HashStore() if kind == "hash" else dist.FileStore(str(tmp_path / "store"), 2)
    seen = {}

    class GivingUp:
        """Rank 0's view of the store: rank 1 comes just before rank 0 writes that it did not."""

        def __getattr__(self, name):
            return getattr(store, name)

        def compare_set(self, *args):
            exchange.publish(store, 1, [0, 1], OWN, 20.0)
            seen[1] = exchange.collect(store, [0, 1])
            return store.compare_set(*args)

    exchange.publish(GivingUp(), 0, [0, 1], OWN, 0.0)
    seen[0] = exchange.collect(store, [0, 1])
    assert seen[0] == seen[1] == exchange.Answers((), {0: OWN, 1: OWN})
