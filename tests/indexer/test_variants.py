"""How many variants Triton compiles, by its own cache key; stock's kernel beside ours.

Both get random arguments. Only stock's is told which rows of its requests to write, a slice; ours
writes all of them, and is told how many rows and keys there is memory for.
"""

import json
import os
import subprocess
import sys

import pytest

from release_marks import RELEASE

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

# In a process of its own: elsewhere in the tests kernels are interpreted, and have no key.
PROGRAM = """
import json, os, random
from types import SimpleNamespace
from unittest import mock
from vllm_dcp_mla.simulate import driver
driver.ensure_loaded()
os.environ["DCP_MLA_SIMULATED_GPU"] = "b200"
from vllm_dcp_mla.simulate import platform
platform.install()
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from vllm.v1.attention.backends.mla import indexer
from vllm_dcp_mla.indexer import chunk_kernel, hooks, length_kernel

def keys(kernel, calls):
    bind = create_function_from_signature(
        kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 100, 32))
    )
    return {str(bind(**call)[1]) for call in calls}

def warmed_keys(kernel, owner, compile_keys):
    # Triton's keys of what a warm-up compiles.
    calls = []
    with mock.patch.object(kernel, "warmup", lambda *a, grid, **kw: calls.append((a, kw))):
        for key in compile_keys:
            owner.compile(key)
    names = [p.name for p in kernel.params]
    return keys(kernel, [{**dict(zip(names, a)), **kw} for a, kw in calls])

memory = torch.zeros(4096, dtype=torch.int32)
draw = random.Random(0)
def view():
    return memory[draw.randrange(9):]
def query_slice():
    start = draw.choice([0, 1, 2, 16, 77, 1024, 5965])
    return start, start + draw.choice([1, 2, 15, 16, 1000, 8192])

ours, stock = [], []
for _ in range(3000):
    dcp = draw.choice([1, 2, 4, 8])
    rank, interleave = draw.randrange(dcp), draw.choice([1, 2, 16, 64])
    ours.append({
        **{name: view() for name in chunk_kernel._POINTERS},
        **dict(token_origin=draw.choice([0, 1, 16, 33]), dcp_rank=rank, dcp_world=dcp,
               interleave=interleave, num_rows=draw.choice([1, 2, 16, 77, 8192]),
               num_keys=draw.choice([0, 1, 16, 5965, 131072]), BLOCK=1024, COMPRESS_RATIO=1),
    })
    low, high = query_slice()
    names = [p.name for p in indexer.BuildPrefillChunkMetadataKernel.kernel.params]
    stock.append({
        **{name: view() for name in names if name.endswith("_ptr")},
        **dict(query_slice_start=low, query_slice_stop=high, DCP_RANK=rank, DCP_WORLD=dcp,
               DCP_INTERLEAVE=interleave, BLOCK_SIZE=1024, COMPRESS_RATIO=1),
    })

# What an engine calls stock's kernel with: rank 3 of 4, one pointer of any alignment.
runtime = [
    {name: memory if name.endswith("_ptr") else value for name, value in call.items()}
    | dict(uncompressed_seq_lens_ptr=view(), DCP_RANK=3, DCP_WORLD=4, DCP_INTERLEAVE=1)
    for call in stock
]

def config(pcp, dcp=4, model_type="deepseek_v32"):
    text = SimpleNamespace(model_type=model_type)
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192),
        model_config=SimpleNamespace(hf_text_config=text, hf_config=text),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=dcp, prefill_context_parallel_size=pcp,
            cp_kv_cache_interleave_size=1),
        additional_config={},
    )

def stock_keys(config):
    group = SimpleNamespace(rank_in_group=3)
    with mock.patch.object(indexer, "get_dcp_group", lambda: group):
        kernel = indexer.BuildPrefillChunkMetadataKernel()
        return kernel, set(kernel.get_warmup_keys(vllm_config=config))

def warmed(config):
    return len(stock_keys(config)[1])

lengths = [
    {**{name: view() for name in length_kernel._POINTERS},
     **dict(count=draw.choice([1, 2, 16, 77, 8192]), dcp_rank=draw.randrange(8),
            dcp_world=draw.choice([1, 2, 4, 8]), interleave=draw.choice([1, 2, 16, 64]),
            BLOCK=length_kernel._BLOCK)}
    for _ in range(300)
]
length_owner = length_kernel.LOCAL_LENGTHS_KERNEL

before = [warmed(config(1)), warmed(config(4))]
owner, compile_keys = stock_keys(config(1))
stock_late = keys(owner.kernel, runtime) - warmed_keys(owner.kernel, owner, compile_keys)
import vllm.model_executor.models.deepseek_v2
hooks.install()
our_kernel, our_owner = chunk_kernel._chunk_bounds_kernel, chunk_kernel.CHUNK_BOUNDS_KERNEL
ours_late = keys(our_kernel, ours) - warmed_keys(
    our_kernel, our_owner, our_owner.get_warmup_keys(1))
print("REPORT " + json.dumps({
    "ours_late": len(ours_late),
    "stock_late": len(stock_late),
    "lengths": len(keys(length_kernel._local_lengths_kernel, lengths)),
    "lengths_late": len(
        keys(length_kernel._local_lengths_kernel, lengths) - warmed_keys(
            length_kernel._local_lengths_kernel, length_owner, length_owner.get_warmup_keys())),
    "ours": len(keys(chunk_kernel._chunk_bounds_kernel, ours)),
    "stock": len(keys(indexer.BuildPrefillChunkMetadataKernel.kernel, stock)),
    "ours_warmed": len(set(chunk_kernel.CHUNK_BOUNDS_KERNEL.get_warmup_keys(1))),
    "stock_warmed": before,
    "stock_warmed_with_us": [warmed(config(1)), warmed(config(4))],
    "stock_warmed_elsewhere": [
        warmed(config(1, dcp=1)), warmed(config(1, model_type="deepseek_v4"))],
}))
"""


def test_one_variant_where_stock_has_dozens(capsys):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert lines, done.stderr[-3000:]
    report = json.loads(lines[-1].removeprefix("REPORT "))
    with capsys.disabled():
        print(f"\nTriton variants of the chunk kernel over 3,000 random calls of each: {report}")
    assert report["ours"] == report["ours_warmed"] == 1
    assert report["stock"] > 36
    assert report["ours_late"] == 0
    assert (report["lengths"], report["lengths_late"]) == (1, 0)
    # 0.29 warms no slice that starts elsewhere than at 0 or 1.
    old = RELEASE.minor < 30
    assert report["stock_warmed"] == ([12, 12] if old else [36, 72])
    assert bool(report["stock_late"]) is old
    assert report["stock_warmed_with_us"] == [0, 0]
    assert min(report["stock_warmed_elsewhere"]) > 0
