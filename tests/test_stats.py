"""The stat logger: one line, gauges only when switched on, nothing without DCP."""

import logging
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from vllm_dcp_mla.workspace import plan_workspace

pytestmark = pytest.mark.vllm


def config(dcp=8, index_topk=2048, cache_dtype="fp8_e4m3", additional_config=None):
    hf = SimpleNamespace(num_attention_heads=64)
    if index_topk:
        hf.index_topk = index_topk
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=8,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=dcp,
        ),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype, num_gpu_blocks=1000, block_size=64),
        model_config=SimpleNamespace(hf_text_config=hf, served_model_name="glm"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=16384),
        additional_config=additional_config or {},
    )


@pytest.fixture
def stats(cpu_vllm, monkeypatch):
    """The module, on a B200 that is not there, with a registry of its own."""
    from prometheus_client import CollectorRegistry, Gauge

    from vllm_dcp_mla import stats

    capability = SimpleNamespace(major=10, minor=0)
    platform = SimpleNamespace(get_device_capability=lambda: capability)
    monkeypatch.setattr(stats, "current_platform", platform)
    monkeypatch.setattr(stats, "_exported", {})
    registry = CollectorRegistry()
    monkeypatch.setattr(
        "prometheus_client.Gauge",
        lambda *args, **kwargs: Gauge(*args, **kwargs, registry=registry),
    )
    stats.registry = registry
    return stats


@pytest.fixture
def lines(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, logger="vllm.dcp_mla.stats")
    return lambda: [record.getMessage() for record in caplog.records]


def start(stats, **sizes):
    logger = stats.DcpMlaStatLogger(config(**sizes), 0)
    logger.record(None, None, engine_idx=0)
    logger.log_engine_initialized()


def exported(stats):
    return {
        sample.name: sample.value
        for metric in stats.registry.collect()
        for sample in metric.samples
    }


def test_the_plan_is_one_line(stats, lines):
    start(stats)
    (line,) = lines()
    plan = plan_workspace(64, 16384)
    for said in (
        *("tp 8, pcp 1, dcp 8, fp8_e4m3 cache", "64,000 tokens a rank, 512,000 of requests"),
        *(f"{plan.total_bytes:,} bytes", f"{plan.tokens_per_launch:,} tokens a launch at 64 heads"),
    ):
        assert said in line
    assert exported(stats) == {}


@pytest.mark.parametrize("sizes", [{"dcp": 1}, {"index_topk": None}])
def test_nothing_is_said_of_other_engines(stats, lines, sizes):
    start(stats, **sizes, additional_config={"dcp_mla": {"metrics": True}})
    assert lines() == []
    assert exported(stats) == {}


def test_nothing_is_said_when_the_package_is_off(stats, lines, monkeypatch):
    monkeypatch.setenv("VLLM_DCP_MLA_DISABLE", "1")
    start(stats)
    assert lines() == []


def test_a_cache_that_flashmla_reads_has_no_workspace(stats, lines):
    start(stats, cache_dtype="fp8_ds_mla", additional_config={"dcp_mla": {"metrics": True}})
    assert "workspace" not in lines()[0]
    assert exported(stats)["dcp_mla:workspace_bytes"] == 0


def test_gauges_have_the_plans_figures_once_switched_on(stats, lines, monkeypatch):
    monkeypatch.setenv("VLLM_DCP_MLA_METRICS", "1")
    start(stats)
    start(stats)  # another engine of the process
    assert exported(stats) == {
        "dcp_mla:dcp_world_size": 8,
        "dcp_mla:kv_tokens_per_rank": 64_000,
        "dcp_mla:kv_tokens_logical": 512_000,
        "dcp_mla:workspace_bytes": 951_058_432,
        "dcp_mla:tokens_per_launch": 4096,
    }
    assert {name.removeprefix(stats.PREFIX) for name in exported(stats)} == set(stats.GAUGES)
    # vLLM takes collectors whose name holds its own out of the registry when an engine starts.
    assert not any("vllm" in name for name in exported(stats))


def test_stock_vllm_finds_the_logger(stats):
    from vllm.v1.metrics.loggers import load_stat_logger_plugin_factories

    assert stats.DcpMlaStatLogger in load_stat_logger_plugin_factories()


@pytest.mark.parametrize("installed", [True, False])
def test_statistics_stay_on_where_it_is_installed_as_the_setting_says(
    cpu_vllm, monkeypatch, installed
):
    """Under ``--disable-log-stats``. Once vLLM leaves them off, so may the sentence."""
    from vllm.v1.engine import async_llm

    from vllm_dcp_mla.settings import Settings

    class EnoughError(Exception):
        """Behind what is looked at."""

    def stop(config):
        raise EnoughError

    monkeypatch.setattr(async_llm, "renderer_from_config", stop)
    monkeypatch.setattr(async_llm, "configure_logging_if_needed", lambda _: None, raising=False)
    if not installed:
        monkeypatch.setattr(async_llm, "load_stat_logger_plugin_factories", list)
    engine = async_llm.AsyncLLM.__new__(async_llm.AsyncLLM)
    with pytest.raises(EnoughError):
        engine.__init__(
            MagicMock(**{"observability_config.otlp_traces_endpoint": None}), None, False
        )
    assert engine.log_stats is installed
    assert "`--disable-log-stats`" in Settings.model_fields["metrics"].description


def test_stocks_manager_takes_it(stats, lines):
    from vllm.v1.metrics.loggers import PerEngineStatLoggerAdapter

    adapter = PerEngineStatLoggerAdapter(config(), [0], stats.DcpMlaStatLogger)
    adapter.record(None, None, engine_idx=0)
    adapter.log_engine_initialized()
    assert len(lines()) == 1
