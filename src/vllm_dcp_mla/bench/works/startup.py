"""Kernels compiled before serving, ours and stock's for the same engine, and the plugin's import.

Each is compiled in a process of its own with an empty cache of Triton's.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from ..rows import Row
from ..workbench import Workbench

_SECONDS = 300
_IMPORTS = 5
PROVIDERS = ("vllm_dcp_mla", "stock")
_IMPORT = (
    "import time; t = time.perf_counter(); import vllm_dcp_mla.plugin; "
    "print(1e6 * (time.perf_counter() - t))"
)


def run(workbench: Workbench) -> Iterator[Row]:
    """Rows of the import, and of compiling where there is a GPU to compile for."""
    times = [float(_python("-c", _IMPORT).split()[-1]) for _ in range(_IMPORTS)]
    middle = statistics.median(times)
    yield Row(
        *("startup", "import of the entry point's module", "vllm_dcp_mla"),
        us=middle,
        spread=(max(times) - min(times)) / min(times),
    )
    for provider in PROVIDERS:
        compiles = workbench.device.type == "cuda" and not workbench.quick
        counts = _compile(provider, compiles=compiles)
        yield Row(
            *("startup", "kernels under DCP that are compiled before serving", provider),
            us=counts["us"],
            counted={"variants": float(counts["variants"])},
            note=None
            if counts["us"] is not None
            else "counted only: compiling takes a GPU, and minutes",
        )


def _compile(provider: str, *, compiles: bool) -> dict[str, Any]:
    what = "compile" if compiles else "count"
    with tempfile.TemporaryDirectory() as folder:
        answer = _python("-m", __name__, provider, what, TRITON_CACHE_DIR=folder)
    counts: dict[str, Any] = json.loads(answer.splitlines()[-1])
    return counts


def _python(*arguments: str, **environment: str) -> str:
    """The standard output of a fresh process.

    Raises:
        RuntimeError: it failed.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{' '.join(arguments[:3])} failed: {last}")
    return done.stdout


def warmed(provider: str, config: Any, heads: int) -> list[tuple[Any, tuple[Any, ...]]]:
    """Kernels and arguments of their warm-up for GLM-5.2 at TP8 DCP8 on Hopper.

    What both sides need alike is in both: the indexer's decode kernels.

    Args:
        provider: of :data:`PROVIDERS`.
        config: the engine's configuration.
        heads: query heads of the DCP group.
    """
    import torch
    from vllm.v1.attention.backends.mla import compressor_utils, indexer

    from ...indexer.chunk_kernel import CHUNK_BOUNDS_KERNEL
    from ...indexer.length_kernel import LOCAL_LENGTHS_KERNEL
    from ...kernels import finish, spread, triton_decode
    from ...key_splits import tilings_of
    from ..inputs import DIMS, TOPK

    kernels: list[tuple[Any, tuple[Any, ...]]] = [
        (compressor_utils._COMPRESSED_SLOT_MAPPING_KERNEL, (config,)),
        (indexer._PREPARE_UNIFORM_DECODE_KERNEL, ()),
    ]
    if provider == "stock":
        # The package is switched off in that process: these are stock's variants.
        kernels.append((indexer._BUILD_PREFILL_CHUNK_METADATA_KERNEL, (config,)))
        return kernels
    kernels += [(CHUNK_BOUNDS_KERNEL, (1,)), (LOCAL_LENGTHS_KERNEL, ())]
    tilings = tilings_of(heads, TOPK // config.parallel_config.decode_context_parallel_size)

    def collect(kernel: Any, *arguments: Any) -> None:
        kernels.append((kernel, arguments))

    triton_decode.warm_up(torch.bfloat16, DIMS, tilings, collect)
    finish.warm_up(DIMS, collect)
    spread.warm_up(DIMS, collect)
    return kernels


def main(provider: str, what: str) -> None:
    """Counts, or compiles, and prints what came of it."""
    import logging

    logging.getLogger("vllm").setLevel(logging.ERROR)
    if provider == "stock":
        os.environ["VLLM_DCP_MLA_DISABLE"] = "1"
    from ...models import load_config
    from ...selftest import world
    from ..engine import DCP, RANK, TP, prepare

    prepare("cuda" if what == "compile" else "cpu")
    import torch

    config = world.engine_config(load_config("glm-5.2"), TP, DCP, "ag_rs")
    heads = config.model_config.hf_text_config.num_attention_heads
    from types import SimpleNamespace
    from unittest import mock

    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.mla import indexer

    group = SimpleNamespace(rank_in_group=RANK, world_size=DCP)
    with (
        set_current_vllm_config(config),
        mock.patch.object(indexer, "get_dcp_group", return_value=group),
    ):
        kernels = warmed(provider, config, heads)
        variants = sum(len(kernel.get_warmup_keys(*a)) for kernel, a in kernels)
        us = None
        if what == "compile":
            torch.zeros(1, device="cuda")  # so that starting CUDA is not in it
            started = time.perf_counter()
            for kernel, arguments in kernels:
                kernel.warmup(*arguments)
            us = 1e6 * (time.perf_counter() - started)
    print(json.dumps({"variants": variants, "us": us}))


if __name__ == "__main__":
    main(*sys.argv[1:])
