"""Which backend stock vLLM picks for one configuration, and why not the others.

A process answers one question, since vLLM keeps its selections: :func:`ask` starts it, and running
this module as a program is the process. It loads plugins as vLLM does, so that the answer is that
of the machine it runs on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .gpus import GPUS

_ANSWER = "vllm-dcp-mla selection: "
_TIMEOUT_S = 240


class SelectionError(RuntimeError):
    """vLLM could not be asked, or would not have the configuration; the message says why."""


@dataclass(frozen=True, slots=True)
class Question:
    """A configuration to select for.

    Attributes:
        model_config: the model's ``config.json``.
        gpu: a name of :data:`.gpus.GPUS`, or None for the GPU of this machine.
        tp, pcp, dcp, kv_cache_dtype, max_num_batched_tokens: vLLM's flags.
        comm: ``--dcp-comm-backend``; None leaves it to the model's default.
        backend: ``--attention-backend``; None for automatic selection.
        mtp: ``num_speculative_tokens`` of an MTP drafter; 0 for none.
    """

    model_config: Mapping[str, Any]
    gpu: str | None
    tp: int
    pcp: int
    dcp: int
    kv_cache_dtype: str = "auto"
    max_num_batched_tokens: int = 8192
    comm: str | None = None
    backend: str | None = None
    mtp: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What vLLM said.

    Attributes:
        picked: name of the backend, None when there is none.
        cls: its class, ``module.Class``.
        kv_cache_dtype: the cache dtype after the model's defaults.
        heads_per_rank: query heads of a rank.
        refused: reasons by name, of sparse backends only.
        error: what vLLM raised instead of picking.
    """

    picked: str | None
    cls: str | None
    kv_cache_dtype: str
    heads_per_rank: int
    refused: dict[str, list[str]] = field(default_factory=dict)
    error: str | None = None


def ask(question: Question, environ: Mapping[str, str] | None = None) -> Answer:
    """Asks in a fresh process.

    Args:
        question: the configuration.
        environ: environment of that process; this one's by default.

    Raises:
        SelectionError: vLLM is missing, or refused the configuration as a whole.
    """
    env = dict(os.environ if environ is None else environ)
    env.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    if question.gpu is not None:
        # With no device visible, vLLM treats Triton as it would where the GPU is.
        env["CUDA_VISIBLE_DEVICES"] = ""
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps(asdict(question)),
            env=env,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise SelectionError(f"vLLM did not answer within {_TIMEOUT_S} s") from None
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(_ANSWER):
            answer = json.loads(line[len(_ANSWER) :])
            if "refused_config" in answer:
                raise SelectionError(answer["refused_config"])
            return Answer(**answer)
    tail = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    raise SelectionError(f"asking vLLM failed with exit status {done.returncode}: {tail}")


def _answer(question: Question) -> dict[str, Any]:
    if question.gpu is not None:
        os.environ["DCP_MLA_SIMULATED_GPU"] = GPUS[question.gpu].name
        from . import platform

        platform.install()
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(question.model_config))
        try:
            config = EngineArgs(
                model=folder,
                skip_tokenizer_init=True,
                load_format="dummy",
                tensor_parallel_size=question.tp,
                prefill_context_parallel_size=question.pcp,
                decode_context_parallel_size=question.dcp,
                kv_cache_dtype=question.kv_cache_dtype,
                max_model_len=131072,
                max_num_batched_tokens=question.max_num_batched_tokens,
                dcp_comm_backend=question.comm,
                attention_backend=question.backend,
                speculative_config={"method": "mtp", "num_speculative_tokens": question.mtp}
                if question.mtp
                else None,
            ).create_engine_config()
        except (ValueError, NotImplementedError, KeyError) as error:
            return {"refused_config": f"{type(error).__name__}: {error}"}
    with set_current_vllm_config(config):
        return asdict(_select(config))


def _select(config: Any) -> Answer:
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.attention import selector

    parallel = config.parallel_config
    hf = config.model_config.hf_text_config
    heads = config.model_config.get_num_attention_heads(parallel)
    dtype = config.cache_config.cache_dtype
    sparse = hasattr(hf, "index_topk")
    head_size = hf.kv_lora_rank + hf.qk_rope_head_dim
    picked, error = None, None
    try:
        picked = selector.get_attn_backend(
            head_size, torch.bfloat16, dtype, use_mla=True, use_sparse=sparse, num_heads=heads
        )
    except ValueError as problem:
        error = str(problem)
    wanted = selector.AttentionSelectorConfig(
        head_size=head_size,
        dtype=torch.bfloat16,
        kv_cache_dtype=dtype,
        block_size=None,
        use_mla=True,
        use_sparse=sparse,
        use_pcp=parallel.prefill_context_parallel_size > 1,
        use_dcp=parallel.decode_context_parallel_size > 1,
    )
    _, refused = current_platform.get_valid_backends(
        device_capability=current_platform.get_device_capability(),
        attn_selector_config=wanted,
        num_heads=heads,
    )
    return Answer(
        picked=picked.get_name() if picked else None,
        cls=f"{picked.__module__}.{picked.__qualname__}" if picked else None,
        kv_cache_dtype=dtype,
        heads_per_rank=heads,
        refused={
            member.name: reasons
            for member, (_, reasons) in refused.items()
            if "SPARSE" in member.name
        },
        error=error,
    )


if __name__ == "__main__":
    print(_ANSWER + json.dumps(_answer(Question(**json.load(sys.stdin)))), flush=True)
