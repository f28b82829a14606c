"""Real processes around one TCPStore."""

import socket
from types import SimpleNamespace

import torch.distributed as dist

from vllm_dcp_mla.selftest import world

OWN = {"host": "a", "vllm": "0.33.0", "VLLM_USE_DIRECT_DCP_A2A": "unset", "heads": "64"}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def connect(rank, num_ranks, port):
    """Joins a gloo world whose store rank 0 holds."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks
    )


def make_group(rank, ranks):
    """What is used of vLLM's GroupCoordinator; collective over the world, as vLLM's own."""
    group = dist.new_group(ranks, backend="gloo")
    return SimpleNamespace(rank=rank, ranks=ranks, cpu_group=group)


def keys_left():
    """Keys of all comparisons that the store holds."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return [key for key in store.list_keys() if "vllm_dcp_mla/" in key]


def say(group, number=1, wait_s=20.0, **changes):
    """Compares; returns the error's text, None where all agree."""
    from vllm_dcp_mla import agreement

    try:
        agreement.compare(group, number, {**OWN, **changes}, wait_s)
    except agreement.AgreementError as error:
        return str(error)
    return None


def _on_rank(rank, num_ranks, folder, port, body, args):
    connect(rank, num_ranks, port)
    result = body(rank, num_ranks, *args)
    dist.barrier()  # rank 0 holds the store
    dist.destroy_process_group()
    return result


def on_ranks(num_ranks, body, *args):
    """``body(rank, num_ranks, *args)`` on every rank of a gloo world; results in rank order."""
    return world.run_ranks(num_ranks, _on_rank, free_port(), body, args, timeout_s=60)
