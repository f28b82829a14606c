"""One rank of an engine, as a process: ``python -m vllm_dcp_mla.rehearse.rank FOLDER PARENT``.

Reads ``engine.json`` and ``requests.json`` of the folder, writes events and results beside them,
and ends with the process PARENT. Every rank runs its own scheduler (``external_launcher``), so all
serve identical requests in identical steps.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from . import record, soak
from .engine import EngineSpec, llm_arguments
from .observe import Notes, install
from .processes import die_with_parent
from .record import Recorder
from .requests import Requests
from .serve import serve


def main(folder: Path, parent: int) -> None:
    """Serves the folder's requests as the rank that the environment names."""
    rank = int(os.environ["RANK"])
    die_with_parent(parent)
    files = RankFiles(folder, rank)
    # The parent asks with this signal where a rank hangs.
    faulthandler.register(signal.SIGUSR1, files.stack.open("w"), all_threads=True)
    spec = EngineSpec.model_validate_json((folder / "engine.json").read_text())
    requests = Requests.model_validate_json((folder / "requests.json").read_text())
    notes = Notes()
    files.event("starting")
    if spec.shared:
        _keep_flashinfer_exchange_out()
    install(notes, files.last_collective)
    started = time.monotonic()
    from vllm import LLM

    from . import held  # needs torch, which the parent of ranks does not

    workspace_requests = held.watch_workspace()

    llm = LLM(**llm_arguments(spec))
    ready_seconds = time.monotonic() - started
    before = _state()
    warm_up = list(notes.late_compiles)
    notes.clear()
    files.event("ready", seconds=round(ready_seconds, 1))
    assert not warm_up, "the monitor starts after the warm-up"
    recorder = _recorder(llm, spec, requests)
    started = time.monotonic()
    answers = _answer(llm.llm_engine, requests, files)
    result = {
        "rank": rank,
        "ready_seconds": ready_seconds,
        "serve_seconds": time.monotonic() - started,
        "late_compiles": notes.late_compiles,
        "syncs": notes.syncs,
        "collectives": notes.collectives,
        "before": before,
        "after": _state(),
        "engine": _describe(llm),
        "held": held.read(llm, workspace_requests),
        "metrics": _metrics(llm),
        **answers,
    }
    if recorder is not None:
        recorder.save(files.record)
        result["record"] = str(files.record)
    files.result.write_text(json.dumps(result))
    files.event("done")
    llm.llm_engine.engine_core.shutdown()


def _recorder(llm: Any, spec: EngineSpec, requests: Requests) -> Recorder | None:
    """Hooked in, where something is to be kept."""
    if requests.recording is None:
        return None
    layers = llm.llm_engine.model_config.hf_text_config.num_hidden_layers
    lengths = [len(prompt) for prompt in requests.prompts]
    recorder = Recorder(requests.recording, lengths, layers, spec.mtp > 0)
    record.install(recorder)
    return recorder


def _answer(engine: Any, requests: Requests, files: RankFiles) -> dict[str, Any]:
    """The log-probabilities of every request, or what a soak showed."""
    if requests.soak is not None:
        return {"soak": soak.run(engine, requests, requests.soak, _state, _agree, files.event)}
    scores = {}
    for done, (index, positions) in enumerate(serve(engine, requests), start=1):
        scores[index] = positions
        files.event("served", done=done, of=len(requests.prompts))
    return {"scores": [scores[index] for index in range(len(requests.prompts))]}


def _agree(yes: bool) -> bool:
    """Whether every rank says yes."""
    import torch
    from vllm.distributed.parallel_state import get_world_group

    answer = torch.tensor(int(yes))
    torch.distributed.all_reduce(
        answer, torch.distributed.ReduceOp.MIN, group=get_world_group().cpu_group
    )
    return bool(answer)


class RankFiles:
    """Where a rank leaves what its parent reads."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.events = folder / f"rank{rank}.events"
        self.log = folder / f"rank{rank}.log"
        self.stack = folder / f"rank{rank}.stack"
        self.last_collective = folder / f"rank{rank}.last"
        self.result = folder / f"rank{rank}.json"
        self.record = folder / f"rank{rank}.safetensors"

    def event(self, name: str, **values: Any) -> None:
        """Appends one line; the parent shows the last one."""
        with self.events.open("a") as file:
            file.write(json.dumps({"event": name, **values}) + "\n")

    def last_event(self) -> dict[str, Any]:
        """The newest whole line, empty before the first."""
        try:
            lines = self.events.read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return {}
        whole = [line for line in lines if line.endswith("\n")]
        return json.loads(whole[-1]) if whole else {}


def _keep_flashinfer_exchange_out() -> None:
    """FlashInfer's all-reduce maps its peers' GPUs and hangs where ranks share one."""
    import vllm.distributed.device_communicators.flashinfer_all_reduce as exchange

    def no_workspace(*args: Any, **kwargs: Any) -> None:
        return None

    exchange.get_fi_ar_workspace = exchange.get_fi_ar_quant_workspace = no_workspace


def _state() -> dict[str, Any]:
    """Device memory of this process, and our buffers' names, addresses and bytes."""
    import torch

    from .. import device_buffer

    free, total = torch.cuda.mem_get_info()
    return {
        "gpu": str(torch.cuda.get_device_properties().uuid),
        "device_bytes": total - free,
        "allocated_bytes": torch.cuda.memory_allocated(),
        "reserved_bytes": torch.cuda.memory_reserved(),
        "buffers": [
            [name, tensor.data_ptr(), tensor.numel()] for name, tensor in device_buffer.held()
        ],
    }


def _describe(llm: Any) -> dict[str, Any]:
    """Backend, kernel, memory of the loaded model, and whether vLLM's monitors are on."""
    from vllm.utils import gpu_sync_debug, jit_monitor

    worker = llm.llm_engine.model_executor.driver_worker.worker
    runner = worker.model_runner
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    impls = [layer.impl for layer in layers.values() if hasattr(layer, "impl")]
    kernels = {name for impl in impls for name in getattr(impl, "kernel_names", ())}
    return {
        "impls": sorted({f"{type(i).__module__}.{type(i).__qualname__}" for i in impls}),
        "kernels": sorted(kernels),
        "model_bytes": getattr(runner, "model_memory_usage", None),
        "jit_monitor": jit_monitor._mode if jit_monitor.is_active() else None,
        "sync_check": gpu_sync_debug._SYNC_CHECK_MODE
        if gpu_sync_debug._sync_check_enabled
        else None,
        "kv_blocks": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks,
        "kv_block_tokens": llm.llm_engine.vllm_config.cache_config.block_size,
    }


def _metrics(llm: Any) -> dict[str, float]:
    """Drafted and accepted tokens, preempted requests: vLLM's own counters."""
    wanted = {
        "vllm:spec_decode_num_draft_tokens": "drafted",
        "vllm:spec_decode_num_accepted_tokens": "accepted",
        "vllm:num_preemptions": "preemptions",
    }
    return {wanted[m.name]: m.value for m in llm.get_metrics() if m.name in wanted}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
