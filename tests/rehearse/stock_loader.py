"""Loads a checkpoint into stock vLLM's CUDA model classes on the CPU, and says what was left over.

A program, because a process has one platform: an H200 that is not there, with tensors on the CPU.
"""

import json
import os
import sys
import tempfile
from pathlib import Path


def main(folder):
    os.environ.update(
        DCP_MLA_SIMULATED_GPU="h200",
        CUDA_VISIBLE_DEVICES="",
        HF_HUB_OFFLINE="1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_DISABLE_SHARED_EXPERTS_STREAM="1",  # a CUDA stream
    )
    from vllm_dcp_mla.simulate import platform

    platform.SimulatedCudaPlatform.device_type = "cpu"
    platform.install()
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    torch.set_num_threads(1)
    config = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        max_model_len=4096,
        max_num_batched_tokens=512,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
    ).create_engine_config()
    with tempfile.NamedTemporaryFile() as store, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{store.name}", 0, backend="gloo")
        initialize_model_parallel(1)
        torch.set_default_dtype(torch.bfloat16)
        drafts = config.speculative_config.draft_model_config
        return {
            "target": fill(initialize_model(config), folder),
            "draft": fill(initialize_model(config, model_config=drafts, prefix="draft"), folder),
        }


def fill(model, folder):
    """Loads a model's weights over NaN; what it is, what stayed NaN, what it says it skipped."""
    import torch
    from safetensors import safe_open

    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.data.fill_(torch.nan)
    with safe_open(Path(folder) / "model.safetensors", "pt") as file:
        loaded = model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
    return {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "elements": sum(parameter.numel() for parameter in parameters.values()),
        "unfilled": sorted(name for name, value in parameters.items() if value.isnan().any()),
        "unloaded": sorted(set(parameters) - loaded),
    }


if __name__ == "__main__":
    print("REPORT " + json.dumps(main(sys.argv[1])))
