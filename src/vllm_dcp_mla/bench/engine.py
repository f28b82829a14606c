"""vLLM in this process as an engine's worker has it, and metadata builders made from it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

DCP = 8
TP = 8
RANK = 1  # its lengths differ from those of the rank that holds most
_BLOCK = 64
_WIDTH = 2048 + 2  # blocks a request at 1,048,576 tokens over 8 ranks, and the one being filled
_MAX_TOKENS = 16_384
_MAX_SEQS = 512


def prepare(device_type: str) -> None:
    """Imports vLLM, once, with the plugin registered as in a worker.

    Args:
        device_type: ``cuda`` for vLLM's own platform, ``cpu`` for its CPU platform with Triton
            kernels interpreted.
    """
    if device_type == "cpu":
        from ..selftest import world

        world.prepare("cpu")
        return
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    from ..plugin import register

    register()
    import vllm.model_executor.models.deepseek_v2  # noqa: F401

    from ..indexer import hooks

    hooks.install()


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests of a step.

    Attributes:
        name: for people.
        seq_lens: tokens of each request, those of this step included.
        query_lens: tokens of this step of each.
        decodes: how many of the requests are decodes; they come first.
        drafts: speculative tokens of the engine.
    """

    name: str
    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    decodes: int
    drafts: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return sum(self.query_lens)


@contextmanager
def indexer_builder(provider: str, batch: Batch, device: torch.device) -> Iterator[Any]:
    """GLM-5.2's indexer builder of one rank at TP8 DCP8: ``vllm_dcp_mla``'s or ``stock``'s."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.mla import indexer
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    from ..indexer.builder import DcpIndexerBuilder
    from ..models import load_config
    from ..selftest import world

    config = world.engine_config(load_config("glm-5.2"), TP, DCP, "ag_rs")
    config.scheduler_config.max_num_batched_tokens = _MAX_TOKENS
    config.scheduler_config.max_num_seqs = _MAX_SEQS
    config.model_config.max_model_len = max(131_072, *batch.seq_lens)
    config.attention_config.sparse_mla_prefill_workspace_factor = (
        5 if config.model_config.max_model_len <= 262_144 else 2  # as vLLM chooses it
    )
    if batch.drafts:
        config.speculative_config = SimpleNamespace(
            num_speculative_tokens=batch.drafts, enable_adaptive_verification=False
        )
    group = SimpleNamespace(rank_in_group=RANK, world_size=DCP)
    cls = (
        DcpIndexerBuilder
        if provider == "vllm_dcp_mla"
        else indexer.DeepseekV32IndexerMetadataBuilder
    )
    spec = MLAAttentionSpec(block_size=_BLOCK, num_kv_heads=1, head_size=128, dtype=torch.uint8)
    sms = 132 if device.type == "cpu" else None
    with (
        set_current_vllm_config(config),
        mock.patch.object(indexer, "get_dcp_group", return_value=group),
        mock.patch.object(indexer, "get_pcp_group", return_value=group),
        mock.patch.object(type(config), "num_speculative_tokens", batch.drafts),
        _compute_units(indexer, sms),
    ):
        yield cls(spec, ["indexer"], config, device, block_table_width=_WIDTH)


@contextmanager
def _compute_units(indexer: Any, sms: int | None) -> Iterator[None]:
    """A CPU has no multiprocessors to be asked about."""
    if sms is None:
        yield
        return
    with mock.patch.object(indexer, "num_compute_units", return_value=sms):
        yield


def common_metadata(batch: Batch, device: torch.device) -> Any:
    """vLLM's metadata of a batch on that rank."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from ..topology import local_seq_len

    starts = torch.tensor([0, *batch.query_lens], dtype=torch.int32).cumsum(0).int()
    lengths = torch.tensor(batch.seq_lens, dtype=torch.int32)
    local = torch.tensor([local_seq_len(n, RANK, DCP) for n in batch.seq_lens], dtype=torch.int32)
    requests = len(batch.seq_lens)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=lengths.to(device),
        num_reqs=requests,
        num_actual_tokens=batch.tokens,
        max_query_len=max(batch.query_lens),
        max_seq_len=max(batch.seq_lens),
        block_table_tensor=torch.zeros(requests, _WIDTH, dtype=torch.int32, device=device),
        slot_mapping=torch.full((batch.tokens,), -1, dtype=torch.int64, device=device),
        dcp_local_seq_lens=local.to(device),
        seq_lens_cpu_upper_bound=lengths,
        is_prefilling=torch.arange(requests) >= batch.decodes,
    )


def wrong_rows(metadata: Any, batch: Batch) -> str | None:
    """What is wrong with the number of this rank's keys that each row may see; None for nothing."""
    from ..topology import local_seq_len

    wanted = [
        local_seq_len(length - queries + i + 1, RANK, DCP)
        for length, queries in zip(batch.seq_lens, batch.query_lens, strict=True)
        for i in range(queries)
    ]
    found: list[int] = []
    if metadata.decode is not None:
        found += metadata.decode.seq_lens.reshape(-1).tolist()
    if metadata.prefill is not None:
        for chunk in metadata.prefill.chunks:
            found += (chunk.cu_seqlen_ke - chunk.cu_seqlen_ks).tolist()
    if found == wanted:
        return None
    wrong = [i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b]
    if len(found) != len(wanted):
        return f"{len(found)} rows, {len(wanted)} tokens"
    return f"row {wrong[0]} may see {found[wrong[0]]} keys, {wanted[wrong[0]]} are stored here"
