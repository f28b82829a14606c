import importlib.util
import ipaddress
import re

import pytest

from vllm_dcp_mla.rehearse.engine import (
    GRAPHS,
    SHARED_ENVIRONMENT,
    EngineSpec,
    environment,
    llm_arguments,
)

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")


def spec(**more):
    usual = {"name": "e", "model": "/m", "max_model_len": 3136, "max_num_batched_tokens": 8192}
    return EngineSpec(**{**usual, "kv_cache_bytes": None, "utilization": 0.8, **more})


FULL = {
    "tp": 4,
    "pcp": 2,
    "dcp": 8,
    "comm": "a2a",
    "mtp": 3,
    "backend": "DCP_MLA_SPARSE",
    "kernel": "reference",
    "kv_cache_bytes": 1 << 31,
    "strict": True,
    "shared": True,
}


def test_a_spec_travels_as_json():
    made = spec(**FULL)
    assert EngineSpec.model_validate_json(made.model_dump_json()) == made
    assert made.world == 8


def test_sizes_and_exchange():
    arguments = llm_arguments(spec(**FULL))
    assert arguments["tensor_parallel_size"] == 4
    assert arguments["prefill_context_parallel_size"] == 2
    assert arguments["decode_context_parallel_size"] == 8
    assert arguments["dcp_comm_backend"] == "a2a"
    assert arguments["distributed_executor_backend"] == "external_launcher"
    assert arguments["kv_cache_memory_bytes"] == 1 << 31
    assert arguments["additional_config"] == {"dcp_mla": {"kernel": "reference"}}
    alone = llm_arguments(spec(comm="a2a"))
    for left_out in (
        "dcp_comm_backend",
        "distributed_executor_backend",
        "prefill_context_parallel_size",
        "kv_cache_memory_bytes",
        "attention_backend",
        "speculative_config",
    ):
        assert left_out not in alone


def test_no_code_of_a_model_is_trusted():
    assert llm_arguments(spec())["trust_remote_code"] is False


def test_no_graphs_is_never_enforce_eager():
    """Which would turn vLLM's warm-up and JIT monitor off."""
    for graphs in GRAPHS:
        assert "enforce_eager" not in llm_arguments(spec(graphs=graphs))
    wanted = {"mode": 0, "cudagraph_mode": "NONE"}
    assert llm_arguments(spec(graphs="none"))["compilation_config"] == wanted


@pytest.mark.parametrize(("strict", "mode"), [(True, "error"), (False, "warn")])
def test_only_a_strict_engine_raises(strict, mode):
    one = spec(strict=strict)
    assert llm_arguments(one)["jit_monitor_mode"] == mode
    assert environment(one, 0, 0, 1).get("VLLM_GPU_SYNC_CHECK") == ("error" if strict else None)


@pytest.mark.parametrize("mtp", [1, 3, 8])
def test_some_drafts_are_accepted_and_some_rejected(mtp):
    speculative = llm_arguments(spec(mtp=mtp, backend="DCP_MLA_SPARSE"))["speculative_config"]
    rates = speculative["synthetic_acceptance_rates"]
    assert len(rates) == mtp == speculative["num_speculative_tokens"]
    assert all(0 < rate < 1 for rate in rates)
    assert rates == sorted(rates, reverse=True), "a draft after a rejected one cannot be accepted"
    assert speculative["attention_backend"] == "DCP_MLA_SPARSE"


def test_each_rank_knows_its_place():
    made = environment(spec(tp=2, pcp=2), 3, 1, 4567)
    assert (made["RANK"], made["LOCAL_RANK"], made["WORLD_SIZE"]) == ("3", "1", "4")
    assert (made["MASTER_ADDR"], made["MASTER_PORT"]) == ("127.0.0.1", "4567")
    assert (made["HF_HUB_OFFLINE"], made["VLLM_NO_USAGE_STATS"]) == ("1", "1")
    assert all(isinstance(value, str) for value in made.values())


@pytest.mark.parametrize("shared", [True, False])
def test_no_address_but_the_loopbacks(shared):
    made = environment(spec(**{**FULL, "shared": shared}), 0, 0, 1)
    addresses = [v for v in made.values() if re.fullmatch(r"[\d.]+\.\d+|.*:.*|\w+\.\w+", v)]
    assert len(addresses) == 2
    assert all(ipaddress.ip_address(address).is_loopback for address in addresses)


def test_ranks_that_share_a_gpu_keep_direct_exchanges_out():
    shared, alone = (environment(spec(shared=s), 0, 0, 1) for s in (True, False))
    assert shared.items() >= SHARED_ENVIRONMENT.items()
    assert not alone.keys() & SHARED_ENVIRONMENT.keys()
    assert shared["VLLM_USE_DIRECT_DCP_A2A"] == shared["VLLM_USE_DIRECT_DCP_Q_GATHER"] == "0"


def test_ranks_that_share_a_gpu_autotune_nothing():
    shared, alone = (llm_arguments(spec(shared=s)) for s in (True, False))
    assert shared["enable_flashinfer_autotune"] is False
    assert "enable_flashinfer_autotune" not in alone  # vLLM's default stays


def test_piecewise_graphs_need_breakable_ones():
    name = "VLLM_USE_BREAKABLE_CUDAGRAPH"
    made = {graphs: environment(spec(graphs=graphs), 0, 0, 1).get(name) for graphs in GRAPHS}
    assert made == {"none": None, "piecewise": "1", "full": None}


@pytest.mark.vllm
@needs_vllm
def test_stock_vllm_knows_every_argument_and_variable():
    import dataclasses

    import vllm.envs as envs
    from vllm.config import AttentionConfig, CompilationConfig, CUDAGraphMode
    from vllm.config.speculative import SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    for graphs in GRAPHS:
        arguments = llm_arguments(spec(**FULL, graphs=graphs))
        assert set(arguments) <= known
        assert set(arguments) >= {"attention_backend", "speculative_config", "dcp_comm_backend"}
        compilation = CompilationConfig(**arguments["compilation_config"])
        assert isinstance(compilation.cudagraph_mode, CUDAGraphMode)
        wanted = {"none": "NONE", "piecewise": "PIECEWISE", "full": "FULL_DECODE_ONLY"}
        assert compilation.cudagraph_mode.name == wanted[graphs]
        assert AttentionConfig(**arguments["attention_config"]).sparse_mla_force_mqa is True
        speculative = {field.name for field in dataclasses.fields(SpeculativeConfig)}
        assert set(arguments["speculative_config"]) <= speculative
        for name in environment(spec(**FULL, graphs=graphs), 0, 0, 1):
            if name.startswith("VLLM_"):
                assert name in envs.environment_variables, name
