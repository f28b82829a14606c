"""An indexer builder of one rank, random batches, and a count of what the host reads."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_dcp_mla.models import load_config
from vllm_dcp_mla.topology import local_seq_len

WIDTH = 40


class HostReads(TorchDispatchMode):
    """Counts reads of device values on the host; tensors on "meta" stand for the device's.

    Nothing else notices a meta tensor's lack of values, whatever made it.
    """

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            self.count += 1
            return 64
        target = kwargs.get("device")
        if func is torch.ops.aten._to_copy.default and args[0].is_meta and target is not None:
            assert torch.device(target).type == "meta", "a copy to the host"
        return func(*args, **kwargs)


def on_device(tensor):
    return tensor.to("meta")


@contextmanager
def builder(
    *, ours=True, rank=0, dcp=4, pcp=1, interleave=1, mtp=0, settings=None, model="glm-5.2",
    flatten=None, device="cpu", adaptive=False,
):  # fmt: skip
    """Yields a builder of that rank of TP8; ``flatten`` forces the per-token decode path."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.mla import indexer
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    from vllm_dcp_mla.indexer.builder import DcpIndexerBuilder
    from vllm_dcp_mla.selftest import world

    import vllm.model_executor.models.deepseek_v2  # noqa: F401  isort: skip
    from vllm_dcp_mla.indexer import hooks

    hooks.install()
    config = world.engine_config(load_config(model), 8, dcp, "ag_rs")
    config.scheduler_config.max_num_batched_tokens = 2048
    config.parallel_config.cp_kv_cache_interleave_size = interleave
    config.parallel_config.prefill_context_parallel_size = pcp
    config.attention_config.sparse_mla_prefill_workspace_factor = 5
    config.additional_config = {"dcp_mla": settings or {}}
    if mtp:
        config.speculative_config = SimpleNamespace(
            num_speculative_tokens=mtp, enable_adaptive_verification=adaptive
        )
    group = SimpleNamespace(rank_in_group=rank, world_size=dcp)
    cls = DcpIndexerBuilder if ours else indexer.DeepseekV32IndexerMetadataBuilder
    spec = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=128, dtype=torch.uint8)
    with (
        set_current_vllm_config(config),
        mock.patch.object(indexer, "get_dcp_group", lambda: group),
        mock.patch.object(indexer, "get_pcp_group", lambda: group),
        mock.patch.object(indexer, "num_compute_units", lambda index: 132),
        mock.patch.object(type(config), "num_speculative_tokens", mtp),
    ):
        made = cls(spec, ["l"], config, torch.device(device), block_table_width=WIDTH)
        if flatten is not None:
            made.use_flattening = flatten
        yield made


def common_metadata(seq_lens, query_lens, num_decodes, rank, dcp, interleave=1, wrap=lambda t: t):
    """vLLM's metadata of a batch; ``wrap`` makes its device tensors."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    local = [local_seq_len(n, rank, dcp, interleave) for n in seq_lens]
    tokens = int(starts[-1])
    table = torch.arange(len(seq_lens) * WIDTH, dtype=torch.int32).view(-1, WIDTH)
    return CommonAttentionMetadata(
        query_start_loc=wrap(starts.clone()),
        query_start_loc_cpu=starts,
        seq_lens=wrap(lengths.clone()),
        num_reqs=len(seq_lens),
        num_actual_tokens=tokens,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=wrap(table),
        slot_mapping=wrap(torch.full((tokens,), -1, dtype=torch.int64)),
        dcp_local_seq_lens=wrap(torch.tensor(local, dtype=torch.int32)),
        seq_lens_cpu_upper_bound=lengths,
        is_prefilling=torch.arange(len(seq_lens)) >= num_decodes,
    )


def pad(common, requests, tokens):
    """The same batch as a CUDA graph's: requests without length or query, tokens of nobody."""
    starts = torch.cat((common.query_start_loc, common.query_start_loc[-1:].repeat(requests)))
    lengths = torch.cat((common.seq_lens, torch.zeros(requests, dtype=torch.int32)))
    table = torch.cat((common.block_table_tensor, torch.zeros(requests, WIDTH, dtype=torch.int32)))
    return common.replace(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        dcp_local_seq_lens=torch.zeros_like(lengths),
        block_table_tensor=table,
        num_reqs=len(lengths),
        num_actual_tokens=common.num_actual_tokens + tokens,
        is_prefilling=torch.zeros(len(lengths), dtype=torch.bool),
    )


class _Sm100:
    """The platform of this process, but for the two answers by which vLLM knows an SM100."""

    def __init__(self, platform):
        self._platform = platform

    def __getattr__(self, name):
        return getattr(self._platform, name)

    def is_cuda(self):
        return True

    def is_device_capability_family(self, family):
        return family == 100


@contextmanager
def sm100():
    """vLLM's indexer module as on SM100 with DeepGEMM; yields what DeepGEMM was asked to schedule.

    Each entry holds the context lengths of the rows and the request of each row.
    """
    from vllm.v1.attention.backends.mla import indexer

    from vllm_dcp_mla.indexer import hooks

    import vllm.model_executor.models.deepseek_v2  # noqa: F401  isort: skip

    hooks.install()
    asked = []

    def deepgemm(context_lens, block_size, num_sms, indices=None):
        asked.append((context_lens.clone(), indices.clone()))
        return torch.ones(num_sms + 1, 2, dtype=torch.int32)

    dispatch = indexer.get_paged_mqa_logits_metadata
    cell = dispatch.__closure__[dispatch.__code__.co_freevars.index("stock")]
    stock = cell.cell_contents
    with (
        mock.patch.object(indexer, "current_platform", _Sm100(indexer.current_platform)),
        mock.patch.object(indexer, "has_deep_gemm", lambda: True),
    ):
        cell.cell_contents = deepgemm
        try:
            yield asked
        finally:
            cell.cell_contents = stock
