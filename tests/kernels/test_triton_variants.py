"""How our Triton kernels compile for SM90, asked of Triton itself; no GPU is needed for that."""

import json
import os
import subprocess
import sys

import pytest

from release_marks import serves_hopper

pytestmark = [pytest.mark.vllm, pytest.mark.slow, serves_hopper]

# In a process of its own: elsewhere in the tests kernels are interpreted, and have no key.
PROGRAM = """
import json, os, random, re
from vllm_dcp_mla.simulate import driver
driver.ensure_loaded()
os.environ["DCP_MLA_SIMULATED_GPU"] = "h200"
from vllm_dcp_mla.simulate import platform
platform.install()
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature
from vllm_dcp_mla.kernels import finish, merge_parts, spread, triton_bodies, widen
from vllm_dcp_mla.kernels import triton_decode as ours
from vllm_dcp_mla.kernels.base import MlaDims
from vllm_dcp_mla.key_splits import Tiling

TARGET = GPUTarget("cuda", 90, 32)
DIMS = MlaDims(512, 192, 64)
SECOND = (Tiling(),)
LAST = (Tiling(heads=16, warps=4, merges_in_launch=True),)
draw = random.Random(0)

def key(kernel, call):
    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(TARGET))
    options = {n: call.pop(n) for n in ("num_warps", "num_stages") if n in call}
    return str((bind(**call)[1], options))

def spied(launcher):
    calls = []
    launcher.launch = lambda spec, inputs: calls.append(spec[1])
    return calls

def view(dtype):
    memory = torch.zeros(1 << 16, dtype=torch.float32).view(dtype)
    return memory[draw.randrange(9):]

def random_calls(launcher, pointers, integers, warmed):
    for _ in range(300):
        inputs = dict(warmed)
        for name in pointers:
            inputs[name] = view(warmed[name].dtype)
        for name in integers:
            inputs[name] = draw.choice([0, 1, 2, 16, 17, 576, 1 << 20])
        for name in ("score_scale", "value_scale", "scale"):
            if name in inputs:
                inputs[name] = draw.choice([0.0, 1.0, 0.3])
        inputs["num_blocks"] = draw.randrange(1, 1000)
        launcher(**inputs)

report = {}
for name, launcher, pointers, integers, keys in (
    ("attend bf16", ours.ATTEND_KERNEL, ours.ATTEND_POINTERS, ours.ATTEND_INTEGERS,
     ours.ATTEND_KERNEL.get_warmup_keys(torch.bfloat16, DIMS, SECOND)),
    ("attend fp8", ours.ATTEND_KERNEL, ours.ATTEND_POINTERS, ours.ATTEND_INTEGERS,
     ours.ATTEND_KERNEL.get_warmup_keys(torch.float8_e4m3fn, DIMS, SECOND)),
    ("attend and merge", ours.ATTEND_KERNEL, ours.ATTEND_POINTERS, ours.ATTEND_INTEGERS,
     ours.ATTEND_KERNEL.get_warmup_keys(torch.bfloat16, DIMS, LAST)),
    ("merge", merge_parts.MERGE_KERNEL, triton_bodies.MERGE_POINTERS, triton_bodies.MERGE_INTEGERS,
     merge_parts.MERGE_KERNEL.get_warmup_keys(DIMS, torch.float32, 64)),
    ("merge bf16", merge_parts.MERGE_KERNEL, triton_bodies.MERGE_POINTERS,
     triton_bodies.MERGE_INTEGERS,
     merge_parts.MERGE_KERNEL.get_warmup_keys(DIMS, torch.bfloat16, 128)),
    ("spread", spread.SPREAD_KERNEL, spread.SPREAD_POINTERS, spread.SPREAD_INTEGERS,
     spread.SPREAD_KERNEL.get_warmup_keys(DIMS)),
    ("finish", finish.FINISH_KERNEL, finish._POINTERS, finish._INTEGERS,
     finish.FINISH_KERNEL.get_warmup_keys(DIMS)),
    ("widen", widen.WIDEN_KERNEL, widen._WIDEN_POINTERS, widen._WIDEN_INTEGERS,
     widen.WIDEN_KERNEL.get_warmup_keys(DIMS)),
    ("remap", widen.REMAP_KERNEL, widen._REMAP_POINTERS, widen._REMAP_INTEGERS,
     widen.REMAP_KERNEL.get_warmup_keys()),
):
    (warm_key,) = keys
    warmed = launcher.warmup_inputs(warm_key)
    calls = spied(launcher)
    launcher(**warmed)
    random_calls(launcher, pointers, integers, warmed)
    kernel = launcher.kernel
    dtypes = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv", torch.int32: "i32",
              torch.float32: "fp32"}
    first = dict(calls[0])
    options = {n: first.pop(n) for n in ("num_warps", "num_stages") if n in first}
    signature, constants = {}, {}
    for argument in kernel.arg_names:
        value = first[argument]
        if argument in pointers:
            signature[argument] = "*" + dtypes[value.dtype]
        elif argument in integers:
            signature[argument] = "i32"
        elif isinstance(value, float) and argument.islower():
            signature[argument] = "fp32"
        else:
            signature[argument], constants[argument] = "constexpr", value
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants),
        target=TARGET, options=options)
    ptx = compiled.asm["ptx"]
    report[name] = {
        "variants": len({key(kernel, dict(call)) for call in calls}),
        "shared": compiled.metadata.shared,
        "wide_copies": len(re.findall(r"cp\\.async\\.cg\\.shared\\.global [^;]*0x10", ptx)),
        "wide_loads": len(re.findall(r"ld\\.global\\.v4\\.b32", ptx)),
        "narrow_loads": len(re.findall(r"ld\\.global\\.[bu](8|16) ", ptx)),
        "barriers_before_arrival": ptx[: ptx.find("atom.")].count("bar.sync"),
        "arrival": re.findall(r"atom\\.[a-z0-9_.]*add[a-z0-9_.]*", ptx),
        "past_l1": len(re.findall(r"ld\\.global\\.cg\\.v4", ptx)),
        "wgmma": len(re.findall(r"wgmma\\.mma_async", ptx)),
    }
print("REPORT " + json.dumps(report))
"""


@pytest.fixture(scope="module")
def report():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[-1].removeprefix("REPORT "))


@pytest.mark.parametrize(
    "kernel",
    [
        *("attend bf16", "attend fp8", "attend and merge", "merge", "merge bf16", "spread"),
        *("finish", "widen", "remap"),
    ],
)
def test_one_variant_which_is_the_one_that_is_warmed(report, kernel):
    assert report[kernel]["variants"] == 1


@pytest.mark.parametrize("kernel", ["attend bf16", "attend fp8"])
def test_it_fits_a_multiprocessor_and_reads_rows_in_pieces_of_16_bytes(report, kernel):
    """Alignment is not part of the key, yet promised: without that promise rows come in bytes."""
    found = report[kernel]
    assert found["shared"] <= 232_448  # what a block may have on SM90
    element = {"attend bf16": 2, "attend fp8": 1}[kernel]
    of_a_block = 64 * 576 * element // (8 * 32 * 16)  # by a thread, for a block of keys
    assert found["wide_copies"] >= of_a_block
    assert found["wide_copies"] % of_a_block == 0
    assert found["narrow_loads"] == 0
    assert found["wgmma"] > 0


@pytest.mark.parametrize("kernel", ["merge", "merge bf16", "spread", "widen"])
def test_partial_results_and_queries_are_read_in_pieces_of_16_bytes(report, kernel):
    assert report[kernel]["wide_loads"] > 0
    assert report[kernel]["narrow_loads"] == 0


def test_the_last_block_sees_what_the_others_wrote(report):
    """An arrival that orders memory for the whole GPU, and reads that pass the SM's cache by."""
    found = report["attend and merge"]
    (arrival,) = found["arrival"]
    assert ".acq_rel." in arrival
    assert ".gpu." in arrival
    assert found["barriers_before_arrival"] > 0
    assert found["past_l1"] > 0
    assert report["attend bf16"]["arrival"] == []
