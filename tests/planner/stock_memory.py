"""What stock vLLM allocates for a configuration, asked of its own classes on the meta device.

Run as a program with cases as JSON on standard input, it prints one JSON list. The model is stock's
own, with all layers, under a simulated GPU and process groups that communicate with nobody.
"""

import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

ANSWER = "stock memory: "


class Group(SimpleNamespace):
    """A process group's sizes; stock keeps exchanges by group."""

    __hash__ = object.__hash__


def group(size):
    device_group = SimpleNamespace(size=lambda: size, rank=lambda: 0)
    return Group(
        world_size=size,
        size=lambda: size,
        rank_in_group=0,
        rank=0,
        local_rank=0,
        ranks=list(range(size)),
        is_first_rank=True,
        is_last_rank=True,
        device_group=device_group,
        cpu_group=None,
        device_communicator=None,
        unique_name="meta",
    )


def prepare(gpu):
    os.environ.update(
        DCP_MLA_SIMULATED_GPU=gpu,
        HF_HUB_OFFLINE="1",
        CUDA_VISIBLE_DEVICES="",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_PLUGINS="",
        VLLM_USE_DIRECT_DCP_A2A="0",
        VLLM_USE_DIRECT_DCP_Q_GATHER="0",
    )
    from vllm_dcp_mla.simulate import platform

    platform.install()
    platform.SimulatedCudaPlatform.device_type = "meta"
    import torch
    import vllm.utils.torch_utils
    from vllm.v1.worker.workspace import init_workspace_manager

    class NoStream:
        def __init__(self, *args, **kwargs):
            pass

    vllm.utils.torch_utils.aux_stream = lambda: None
    torch.cuda.Stream = torch.cuda.Event = NoStream
    init_workspace_manager(torch.device("meta"), 1)


def engine_config(case, folder):
    from vllm.engine.arg_utils import EngineArgs

    mtp = case.get("mtp", 0)
    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        tensor_parallel_size=case["tp"],
        prefill_context_parallel_size=case.get("pcp", 1),
        decode_context_parallel_size=case.get("dcp", 1),
        dcp_comm_backend=case.get("comm"),
        kv_cache_dtype=case["kv_cache_dtype"],
        max_model_len=case["max_model_len"],
        max_num_seqs=case["max_num_seqs"],
        max_num_batched_tokens=case["max_num_batched_tokens"],
        block_size=64,
        speculative_config={"method": "mtp", "num_speculative_tokens": mtp} if mtp else None,
    ).create_engine_config()


def set_groups(case):
    import vllm.distributed.parallel_state as state

    sizes = {"_TP": case["tp"], "_PCP": case.get("pcp", 1), "_DCP": case.get("dcp", 1)}
    ranks = case["tp"] * case.get("pcp", 1)
    for name, size in {**sizes, "_PP": 1, "_DP": 1, "_EP": ranks, "_WORLD": ranks}.items():
        setattr(state, name, group(size))


def parameter_bytes(module):
    return sum(p.numel() * p.element_size() for p in module.parameters())


def built(config):
    """Bytes of stock's model, and of its drafter where there is one."""
    import torch
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
        model = initialize_model(vllm_config=config)
        drafter = None
        if config.speculative_config is not None:
            drafter = initialize_model(
                vllm_config=config, model_config=config.speculative_config.draft_model_config
            )
    return model, drafter


def attention_layers(config):
    context = config.compilation_config.static_forward_context
    return {name: layer for name, layer in context.items() if hasattr(layer, "get_attn_backend")}


def index_group_bytes(config):
    """Of every group that a layer of the model or its drafter belongs to, once."""
    implementations = (getattr(layer, "impl", None) for layer in attention_layers(config).values())
    groups = {id(i.index_group): i.index_group for i in implementations if i is not None}
    return sum(
        tensor.numel() * tensor.element_size()
        for each in groups.values()
        for tensor in (each.physical_topk_indices, each.valid_topk_counts)
    )


def specs_of(config):
    """The cache spec of every layer, as its backend customises it."""
    return {
        name: layer.get_attn_backend().customize_spec(layer.get_kv_cache_spec(config))
        for name, layer in attention_layers(config).items()
    }


def answer(case):
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import sparse_mla_attention as sparse
    from vllm.v1.attention.backends.mla.index_group import get_sparse_mla_index_group_max_rows
    from vllm.v1.attention.backends.mla.indexer import get_max_prefill_buffer_size
    from vllm.v1.attention.ops.dcp import get_dcp_workspace_max_num_tokens
    from vllm.v1.core.kv_cache_planning import _get_kv_cache_bytes_per_block
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, UniformTypeKVCacheSpecs
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.block_table import get_block_table_width
    from vllm.v1.worker.workspace import current_workspace_manager

    config_json = case.pop("config")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config_json))
        config = engine_config(case, folder)
    set_groups(case)
    manager = current_workspace_manager()
    manager._current_workspaces = [None] * len(manager._current_workspaces)
    builder = sparse.SparseMLACommonMetadataBuilder
    with set_current_vllm_config(config):
        model, drafter = built(config)
        specs = specs_of(config)
        uniform = UniformTypeKVCacheSpecs.from_specs(specs)
        groups = [KVCacheGroupSpec(list(specs), uniform)]
        sharded = replace(next(iter(specs.values())), dcp_sharded=True)
        blocks = sharded.max_num_blocks_per_req(config, config.model_config.max_model_len)
        workspaces = [w.numel() for w in manager._current_workspaces if w is not None]
        return {
            "weights": parameter_bytes(model),
            "drafter": 0 if drafter is None else parameter_bytes(drafter),
            "rope": sum(
                {id(b): b.numel() * b.element_size() for n, b in model.named_buffers()
                 if n.endswith("cos_sin_cache")}.values()
            ),
            "topk": model.model.topk_indices_buffer.numel() * 4,
            "index_groups": index_group_bytes(config),
            "index_group_rows": get_sparse_mla_index_group_max_rows(config),
            "block_bytes": _get_kv_cache_bytes_per_block(groups, KVCacheLayout.LBHNC),
            "block_table_width": get_block_table_width(blocks, 64),
            "context_rows": builder.determine_chunked_prefill_workspace_size(config),
            "indexer_rows": get_max_prefill_buffer_size(config),
            "symmetric_rows": get_dcp_workspace_max_num_tokens(config),
            "reserved": max(workspaces, default=0),
        }  # fmt: skip


def main():
    cases = json.load(sys.stdin)
    prepare(cases["gpu"])
    print(ANSWER + json.dumps([answer(case) for case in cases["cases"]]), flush=True)


if __name__ == "__main__":
    main()
