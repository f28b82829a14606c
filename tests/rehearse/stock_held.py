"""What stock's own objects of an engine hold, read as a rank reads them, on the meta device.

Run as ``stock_held.py FOLDER CASE``, it builds the model, the drafter, their attention groups, KV
cache and block tables of a checkpoint's folder as vLLM's second runner does, and prints one JSON
object: what was read, and why other lines were not.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1] / "planner"))

from stock_memory import ANSWER, attention_layers, built, engine_config, prepare, set_groups

KV_BYTES = 64 << 20


def held(case, folder):
    os.environ["VLLM_USE_DIRECT_DCP_KV_GATHER"] = "0"
    prepare("h200")
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import sparse_mla_attention
    from vllm.v1.worker.gpu import buffer_utils
    from vllm.v1.worker.gpu.spec_decode.eagle import utils

    sparse_mla_attention.PIN_MEMORY = False  # needs a driver
    buffer_utils.is_uva_available = lambda: False

    from vllm_dcp_mla.rehearse.held import Rank, read_lines, watch_workspace

    requests = watch_workspace()
    config = engine_config(case, folder)
    set_groups(case)
    device = torch.device("meta")
    with set_current_vllm_config(config):
        model, drafter = built(config)
        layers = attention_layers(config)
        for layer in layers.values():
            if hasattr(layer, "impl"):
                layer.process_weights_after_loading(torch.bfloat16)
        drafted = set()
        if drafter is not None:
            behind = config.model_config.hf_config.num_hidden_layers
            drafted = {name for name in layers if f".{behind}." in name}
            utils.get_model = lambda **_: drafter
            utils.load_eagle_model(model, config)
        runner = run(config, model, drafter, drafted, layers, device)
        lines, not_read = read_lines(Rank(runner, layers, requests))
    return {"lines": lines, "not_read": not_read}


def run(config, model, drafter, drafted, layers, device):
    """What ``GPUModelRunner.initialize_kv_cache`` makes."""
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec, init_attn_backend, init_kv_cache
    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.utils import get_block_table_width

    for name in drafted:
        layers[name].is_draft_layer = True
    config.cache_config.kv_cache_layout = "LBHNC"  # the engine core's choice
    groups = get_kv_cache_groups(config, get_kv_cache_spec(config))
    caches = get_kv_cache_config_from_groups(config, groups, KV_BYTES)
    attn_groups, _, block_sizes = init_attn_backend(caches, config, device)
    widths = [
        get_block_table_width(
            g.kv_cache_spec.max_num_blocks_per_req(config, config.model_config.max_model_len),
            g.kv_cache_spec.block_size,
        )
        for g in groups
    ]
    tables = BlockTables(
        [g.kv_cache_spec.block_size for g in groups],
        config.scheduler_config.max_num_seqs,
        config.scheduler_config.max_num_batched_tokens,
        widths,
        device,
        cp_size=config.parallel_config.decode_context_parallel_size,
    )
    speculator = None
    if drafter is not None:
        again, _, _ = init_attn_backend(caches, config, device, active_layer_names=drafted)
        speculator = SimpleNamespace(model=drafter, attn_groups=again)
    views = init_kv_cache(
        config.compilation_config.static_forward_context, caches, device, block_sizes, config
    )
    return SimpleNamespace(
        model=model,
        speculator=speculator,
        attn_groups=attn_groups,
        block_tables=tables,
        kv_caches=list(views.values()),
        kv_cache_config=caches,
        device=device,
    )


if __name__ == "__main__":
    print(ANSWER + json.dumps(held(json.loads(sys.argv[2]), Path(sys.argv[1]))), flush=True)
