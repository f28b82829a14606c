"""Requests as their flags are typed, planned as on a machine without vLLM."""

from vllm_dcp_mla.compat.libraries import ASSUMED
from vllm_dcp_mla.planner.plan import make_plan
from vllm_dcp_mla.planner.request import RawRequest, read_request
from vllm_dcp_mla.settings import Settings
from vllm_dcp_mla.simulate.gpus import GPUS

DEFAULTS = {
    "model": "glm-5.2-fp8",
    "gpu": "b200",
    "tp": "8",
    "pcp": "1",
    "dcp": "8",
    "kv_cache_dtype": "auto",
    "max_num_batched_tokens": "8192",
    "comm": None,
}
#: A reported failed start: GLM-5.2-NVFP4 on four B200, one rank for all heads.
PCP4_DCP4 = {
    "model": "glm-5.2-nvfp4",
    "tp": 1,
    "pcp": 4,
    "dcp": 4,
    "kv_cache_dtype": "fp8_ds_mla",
}


def planned(user_workspace=None, config=None, **flags):
    typed = {k: v if isinstance(v, bool) else str(v) for k, v in flags.items()}
    request = read_request(RawRequest(**{**DEFAULTS, **typed}))
    return make_plan(request, GPUS[request.gpu], ASSUMED, config or Settings(), user_workspace)


def line(plan, key):
    (found,) = [line for line in plan.lines if line.key == key]
    return found


def keys(plan):
    return {line.key for line in plan.lines}
