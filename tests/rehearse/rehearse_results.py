"""What ranks answer, made up: all as it should be."""

import copy
from pathlib import Path

import numpy as np

from vllm_dcp_mla.rehearse import against_plan
from vllm_dcp_mla.rehearse.configuration import Configuration, Limits, engine_of
from vllm_dcp_mla.rehearse.schedule import EngineResult
from vllm_dcp_mla.simulate.gpus import GPUS
from vllm_dcp_mla.workspace import plan_workspace

TOKENS = 8192
ONE = Configuration("glm-5.2", 2, 1, 2, "bfloat16", "ag_rs", 0, "none", "reference")
#: At 64 heads and 8192 tokens.
WORKSPACE = plan_workspace(64, 8192).total_bytes
BUFFERS = [["workspace", 4096, WORKSPACE], ["counters", 8192, 64]]


def scores(noise, seed, prompts=64):
    """Of some prompts, 2 positions and 3 tokens each, so far from a common truth."""
    truth = np.random.default_rng(0).normal(-5, 1, (prompts, 2, 3))
    return (truth + noise * np.random.default_rng(seed).normal(size=truth.shape)).tolist()


def rank(number, given_scores, strict):
    state = {"buffers": BUFFERS}
    return {
        "rank": number,
        "ready_seconds": 20.04,
        "serve_seconds": 9.96,
        "late_compiles": [],
        "syncs": [],
        "collectives": [[f"all_gather dcp:0 {number}", [0, 1]] for number in range(12)],
        "before": copy.deepcopy(state),
        "after": copy.deepcopy(state),
        "engine": {
            "impls": ["vllm_dcp_mla.backends.trtllm.Impl"],
            "kernels": ["reference"],
            "model_bytes": 1,
            "kv_blocks": 10,
            "kv_block_tokens": 64,
            "jit_monitor": "error" if strict else "warn",
            "sync_check": "error" if strict else None,
        },
        "metrics": {"drafted": 10, "accepted": 5, "preemptions": 3},
        "scores": given_scores,
    }


def held(spec):
    """What a rank of an H200 holds where all is as planned; no estimates."""
    gpu = GPUS["h200"]
    plan = against_plan.plan_of(spec, gpu, 64)
    lines = {}
    if plan.ours is not None:
        lines = {x.key: x.planned for x in against_plan.side_by_side(plan, [], [])}
        for estimated in [x.key for x in plan.lines if x.is_estimate]:
            lines.pop(estimated, None)
    return {
        "lines": lines,
        "not_read": {},
        "gpu": {
            "name": "NVIDIA H200",
            "arch": [9, 0],
            "sms": gpu.sms,
            "memory_bytes": gpu.memory_bytes,
        },
    }


def states(*grown):
    return [
        {
            "gpu": "one",
            "device_bytes": 2_000 + g,
            "reserved_bytes": 500,
            "allocated_bytes": 400,
            "buffers": BUFFERS[:1],
        }
        for g in grown
    ]


def result(configuration, given_scores):
    spec = engine_of(configuration, Path("/m"), Limits(3136, TOKENS), None, (9, 0))
    ranks = [rank(n, given_scores, spec.strict) for n in range(configuration.world)]
    return EngineResult(spec, 30.0, ranks)


def good_results():
    """Of three engines: ONE and its two baselines."""
    made = {
        ONE.name: result(ONE, scores(0.01, 1)),
        ONE.baseline(1).name: result(ONE.baseline(1), scores(0, 0)),
        ONE.baseline(2).name: result(ONE.baseline(2), scores(0.01, 2)),
    }
    assert len(made) == 3
    return made
