"""What ranks answer, made up: all as it should be."""

import copy

import numpy as np

from vllm_dcp_mla.workspace import plan_workspace

#: At 64 heads and 8192 tokens.
WORKSPACE = plan_workspace(64, 8192).total_bytes
BUFFERS = [["workspace", 4096, WORKSPACE], ["counters", 8192, 64]]
SMS = 132


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
        "collectives": 12,
        "collective_order": "abc",
        "before": copy.deepcopy(state),
        "after": copy.deepcopy(state),
        "engine": {
            "impls": ["vllm_dcp_mla.backends.trtllm.Impl"],
            "kernels": ["reference"],
            "sms": SMS,
            "model_bytes": 1,
            "kv_blocks": 10,
            "kv_block_tokens": 64,
            "jit_monitor": "error" if strict else "warn",
            "sync_check": "error" if strict else None,
        },
        "metrics": {"drafted": 10, "accepted": 5, "preemptions": 3},
        "scores": given_scores,
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
