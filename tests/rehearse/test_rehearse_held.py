"""What a rank reads: off stand-ins with vLLM 0.33's attributes, and off stock's own objects."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace as Made

import pytest

torch = pytest.importorskip("torch")

from vllm_dcp_mla.kernels.base import LaunchBuffers  # noqa: E402
from vllm_dcp_mla.rehearse import against_plan  # noqa: E402
from vllm_dcp_mla.rehearse.engine import EngineSpec  # noqa: E402
from vllm_dcp_mla.rehearse.held import Rank, read, read_lines, storage_bytes  # noqa: E402
from vllm_dcp_mla.simulate.gpus import GPUS  # noqa: E402
from vllm_dcp_mla.workspace import plan_workspace  # noqa: E402

ANSWER = "stock memory: "
PLAN = plan_workspace(64, 16, workspace_bytes=80 << 20)


def ints(*shape):
    return torch.zeros(*shape, dtype=torch.int32)


def module(**tensors):
    made = torch.nn.Module()
    for name, tensor in tensors.items():
        made.register_buffer(name, tensor)
    return made


def stand_in(drafter=True):
    """A rank of two layers and a drafter's: a leader, its follower, the drafter's leader."""
    rope, head, topk, own = ints(4, 8), torch.zeros(10, 8), ints(16, 4), ints(16, 4)
    model = module(head=head, tail=head[2:], cos_sin_cache=rope)
    buffers = LaunchBuffers(torch.empty(PLAN.total_bytes, dtype=torch.int8, device="meta"), ints(6))

    def group(logical):
        return Made(
            logical_topk_indices=logical,
            physical_topk_indices=ints(9, 4),
            valid_topk_counts=ints(9),
        )

    shared = group(topk)

    def layer(index_group):
        impl = Made(index_group=index_group, _buffers=buffers, _plans={64: PLAN})
        return Made(impl=impl, topk_indices_buffer=topk)

    def mla(mask=None):
        return Made(
            chunked_prefill_workspace=ints(100),
            topk_mask_workspace=mask,
            req_id_per_token_buffer=ints(16),
            _context_lens_cpu=torch.zeros(8, device="cpu"),
            metadata=object(),
        )

    def indexer():
        return Made(
            expanded_block_table_buffer=ints(16, 2), arange_buffer=ints(17), _no_work=ints(3, 2)
        )

    def groups(*builders):
        return [[Made(metadata_builders=[builder]) for builder in builders]]

    speculator = None
    if drafter:
        drafted = module(shared=head, own=torch.zeros(5), cos_sin_cache=rope)
        speculator = Made(model=drafted, attn_groups=groups(mla(), indexer()))
    cache = torch.zeros(7 * 96, dtype=torch.int8)
    runner = Made(
        model=model,
        speculator=speculator,
        attn_groups=groups(mla(ints(32)), mla(), indexer()),
        block_tables=Made(
            block_tables=[Made(gpu=ints(8, 2))],
            input_block_tables=[ints(8, 2)],
            slot_mappings=torch.zeros(1, 16, dtype=torch.int64),
        ),
        kv_caches=[cache[:400], cache[400:]],
        kv_cache_config=Made(num_blocks=7),
        device=torch.device("cpu"),
    )
    layers = {"0": layer(shared), "1": layer(shared), "0.k_cache": Made()}
    if drafter:
        layers["2"] = layer(group(own))
    requests = {
        "vllm.model_executor.layers.sparse_attn_indexer": 700,
        "vllm.v1.attention.backends.mla.flashmla_sparse": 900,
        "vllm.model_executor.layers.fused_moe.modular_kernel": 5000,
    }
    return Rank(runner, layers, requests)


def test_views_of_one_storage_count_once():
    whole = torch.zeros(100, dtype=torch.int32)
    assert storage_bytes([whole, whole[10:20], whole.view(10, 10).T]) == 400
    assert storage_bytes([whole, whole.clone()]) == 800
    assert storage_bytes([]) == 0


def test_the_meta_device_tells_storages_apart():
    one, two = (torch.zeros(100, dtype=torch.int8, device="meta") for _ in range(2))
    assert storage_bytes([one, two, one[:5]]) == 200


def test_every_line_of_a_rank():
    lines, not_read = read_lines(stand_in())
    assert lines.pop("shared_workspace", 0) == 0
    assert set(not_read) <= {"shared_workspace"}, not_read
    assert lines == {
        "weights": 320 + 20,
        "rope": 128,
        "topk": 2 * 256,
        "index_groups": 2 * (144 + 36),
        "slab": PLAN.slab_bytes,
        "scratch": PLAN.total_bytes - PLAN.slab_bytes,
        "counters": 24,
        "gather": 900,
        "context_rows": 3 * 400,
        "mask": 128,
        # The CPU is the device here.
        "mla_state": 3 * (64 + 32),
        "indexer_tables": 2 * 128,
        "indexer_state": 2 * (68 + 24),
        "block_tables": 2 * 64 + 128,
        "kv.block_bytes": 96,
    }


def test_without_a_drafter():
    lines, _ = read_lines(stand_in(drafter=False))
    assert (lines["weights"], lines["topk"], lines["indexer_tables"]) == (320, 256, 128)


def test_what_a_kernel_lacks_is_no_line():
    rank = stand_in()
    for layer in rank.layers.values():
        if hasattr(layer, "impl"):
            del layer.impl._plans  # Hopper's class has the one buffer
    lines, not_read = read_lines(rank)
    assert lines["partials"] == PLAN.total_bytes
    assert not {"slab", "scratch", "counters"} & {*lines, *not_read}
    for layer in rank.layers.values():
        if hasattr(layer, "impl"):
            del layer.impl._buffers
    assert "partials" not in read_lines(rank)[0]


def test_the_gather_of_prefills():
    rank = stand_in()
    gathered = torch.empty(4000, dtype=torch.uint8)
    for layer in rank.layers.values():
        if hasattr(layer, "impl"):
            layer.impl.gather_plan, layer.impl._workspace = object(), gathered
    assert read_lines(rank)[0]["pcp_gather"] == 4000
    rank.layers["0"].impl.gather_plan = None  # where PCP or DCP is off
    del rank.layers["1"], rank.layers["2"]
    assert "pcp_gather" not in read_lines(rank)[0]


@pytest.mark.parametrize(
    ("breaks", "keys", "reason"),
    [
        (lambda r: delattr(r.runner, "block_tables"), {"block_tables"}, "AttributeError: .*block_"),
        (lambda r: delattr(r.runner, "kv_caches"), {"kv.block_bytes"}, "AttributeError: .*kv_ca"),
        (lambda r: r.requests.clear(), {"gather"}, "NotReadError: none of sparse_attn_indexer, "),
        (
            lambda r: r.layers.clear(),
            {"topk", "index_groups", "slab", "scratch", "counters", "partials", "pcp_gather"},
            "NotReadError: no layer has an attention implementation",
        ),
        (
            lambda r: r.runner.kv_caches.append(ints(1)),
            {"kv.block_bytes"},
            "NotReadError: 676 bytes of KV cache are no whole number of 7 blocks",
        ),
        (
            lambda r: r.runner.attn_groups.clear() or setattr(r.runner, "speculator", None),
            {"context_rows", "mask", "mla_state", "indexer_tables", "indexer_state"},
            "NotReadError: no metadata builder has (chunked_prefill|expanded_block)",
        ),
    ],
)
def test_what_cannot_be_read_is_said_and_nothing_else_is_lost(breaks, keys, reason):
    whole, _ = read_lines(stand_in())
    rank = stand_in()
    breaks(rank)
    lines, not_read = read_lines(rank)
    assert set(not_read) - {"shared_workspace"} == keys
    for key in keys:
        assert re.match(reason, not_read[key])
    assert set(lines) == set(whole) - keys


def test_read_finds_its_way_and_names_the_gpu(monkeypatch):
    rank = stand_in()
    properties = Made(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=150
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    config = Made(compilation_config=Made(static_forward_context=rank.layers))
    worker = Made(worker=Made(model_runner=rank.runner))
    engine = Made(vllm_config=config, model_executor=Made(driver_worker=worker))
    said = json.loads(json.dumps(read(Made(llm_engine=engine), rank.requests)))
    assert said["lines"]["kv.block_bytes"] == 96
    assert said["gpu"] == {"name": "NVIDIA H200", "arch": [9, 0], "sms": 132, "memory_bytes": 150}


@pytest.mark.vllm
def test_the_shared_workspace_is_told_by_who_asked(monkeypatch):
    from vllm.v1.worker.workspace import WorkspaceManager

    from vllm_dcp_mla.rehearse.held import watch_workspace

    monkeypatch.setattr(WorkspaceManager, "get_simultaneous", WorkspaceManager.get_simultaneous)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    largest = watch_workspace()
    manager = WorkspaceManager(torch.device("cpu"))
    (rows, scales) = manager.get_simultaneous(((3, 100), torch.int8), ((3,), torch.float32))
    assert (rows.shape, scales.shape) == ((3, 100), (3,))
    manager.get_simultaneous(((5,), torch.int8))
    assert largest == {__name__: 512 + 256}
    assert manager._current_workspaces[0].numel() == largest[__name__]


ENGINES = {
    "FlashMLA, MTP": {
        **{"tp": 8, "dcp": 2, "kv_cache_dtype": "fp8_ds_mla", "comm": "a2a", "mtp": 1},
    },
    "PCP with DCP": {
        **{"tp": 1, "pcp": 2, "dcp": 2, "kv_cache_dtype": "fp8_ds_mla", "comm": "ag_rs"},
    },
}


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_stock_s_own_objects_hold_what_is_planned(written, engine):
    """All lines but the workspace, which stock's class has not."""
    flags = {"max_model_len": 3136, "max_num_batched_tokens": 8192, **ENGINES[engine]}
    program = Path(__file__).with_name("stock_held.py")
    done = subprocess.run(
        [
            sys.executable,
            str(program),
            str(written.folder),
            json.dumps(flags | {"max_num_seqs": 8}),
        ],
        env={n: v for n, v in os.environ.items() if not n.startswith(("VLLM_", "TRITON_"))},
        capture_output=True,
        text=True,
        timeout=900,
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    assert answers, done.stderr[-3000:]
    said = json.loads(answers[0][len(ANSWER) :])
    spec = EngineSpec(
        **{"name": "one", "model": str(written.folder), "kv_cache_bytes": 1, "utilization": 0.5},
        **flags,
    )
    plan = against_plan.plan_of(spec, GPUS["h200"], 64)
    lines = against_plan.side_by_side(plan, [said["lines"]], [said["not_read"]])
    assert said["not_read"] == {}
    found = against_plan.judge_lines(lines)
    assert found.problems == ()
    for line in (x for x in lines if x.judged == "sum"):
        # Attention's scales are no part of a checkpoint, our builder's schedule none of stock's.
        assert line.held[0] == pytest.approx(line.planned, rel=0.01), line.key
    compared = {x.key for x in lines if x.judged is not None}
    assert compared == {
        *("weights", "rope", "topk", "index_groups", "gather", "context_rows", "indexer_tables"),
        *("indexer_state", "block_tables", "kv.block_bytes"),
    }
