"""The implementation's constructor in vLLM's own groups, joined over TCP on its CPU platform."""

import json
import os
from types import SimpleNamespace
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
from agreement_ranks import free_port, keys_left  # noqa: E402
from backend_engine import backends  # noqa: E402

from release_marks import has_flash_attn_4  # noqa: E402
from vllm_dcp_mla.models import load_config  # noqa: E402
from vllm_dcp_mla.selftest import world  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("inspected_model")]


@pytest.fixture(scope="module")
def inspected_model(cpu_vllm):
    """vLLM inspects a model's class in a process of its own, once, for all ranks forked here."""
    make_config(4)


def make_config(num_ranks, dcp=2, dp=1):
    config = world.engine_config(load_config("glm-5.2"), num_ranks // dp, dcp, "ag_rs")
    config.parallel_config.data_parallel_size = dp
    return config


def join(rank, num_ranks, port, config):
    from vllm.distributed import parallel_state

    parallel = config.parallel_config
    parallel_state.init_distributed_environment(
        num_ranks, rank, f"tcp://127.0.0.1:{port}", rank, "gloo"
    )
    parallel_state.initialize_model_parallel(
        parallel.tensor_parallel_size,
        decode_context_model_parallel_size=parallel.decode_context_parallel_size,
    )


def first_layer(config, member=0, wait_s=60.0):
    """Makes a layer's implementation as vLLM does; the error's text, None where it is made."""
    from vllm.config import set_current_vllm_config

    from vllm_dcp_mla import agreement
    from vllm_dcp_mla.selftest import attention

    backend = backends()[member]
    heads = 64 // config.parallel_config.tensor_parallel_size
    topk = torch.empty(512, 128, dtype=torch.int32)
    shape = SimpleNamespace(cache_dtype="bfloat16")
    with (
        set_current_vllm_config(config),
        mock.patch.dict(agreement.check.__kwdefaults__, wait_s=wait_s),
    ):
        try:
            attention._make_impl(backend, config, shape, topk, heads)
        except agreement.AgreementError as error:
            return str(error)
    return None


def in_groups(body):
    """Runs ``body(rank, config)`` between joining and leaving vLLM's groups."""

    def work(rank, num_ranks, folder, port, dcp, dp, *args):
        from vllm.config import set_current_vllm_config
        from vllm.distributed import parallel_state

        config = make_config(num_ranks, dcp, dp)
        with set_current_vllm_config(config):
            join(rank, num_ranks, port, config)
        parallel_state.get_world_group().barrier()
        result = body(rank, config, *args)
        parallel_state.get_world_group().barrier()
        left = keys_left()
        parallel_state.get_world_group().barrier()
        world.leave()
        return result, left

    return work


def on_ranks(num_ranks, body, *args, dcp=2, dp=1):
    done = world.run_ranks(num_ranks, in_groups(body), free_port(), dcp, dp, *args, timeout_s=200)
    return [result for result, _ in done], [left for _, left in done]


def several_layers(rank, config):
    from vllm.config import replace

    from vllm_dcp_mla import agreement

    asked = mock.Mock(wraps=agreement.compare)
    with mock.patch.object(agreement, "compare", asked):
        texts = [first_layer(config), first_layer(config)]
        # The draft model's configuration, as vLLM derives it; made when weights have been loaded.
        draft = replace(config, attention_config=replace(config.attention_config))
        texts.append(first_layer(draft))
        calls = asked.call_count
        # Another engine in the same processes and groups.
        texts.append(first_layer(make_config(4)))
    return texts, calls, asked.call_count


def test_an_engine_asks_once_and_leaves_nothing():
    results, left = on_ranks(4, several_layers)
    assert results == [([None] * 4, 1, 2)] * 4
    assert left == [[]] * 4


def with_other_environment(rank, config, name, value):
    if rank == 3:
        os.environ[name] = value
    return first_layer(config)


def test_a_rank_with_another_environment_stops_its_own_group():
    name = "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB"
    texts, _ = on_ranks(4, with_other_environment, name, "64")
    assert texts[:2] == [None, None]
    for text in texts[2:]:
        assert "decode context parallel group [2, 3] do not agree" in text
        assert f"- {name}: 512 on rank 2; 64 on rank 3." in text


def with_other_version(rank, config):
    from vllm_dcp_mla.agreement import fingerprint

    real = fingerprint.installed_version
    other = {"vllm": "0.34.1", "triton": "3.6.0"} if rank == 1 else {}
    with mock.patch.object(
        fingerprint, "installed_version", lambda name: other.get(name) or real(name)
    ):
        return first_layer(config)


def test_a_rank_with_other_versions_is_named():
    from importlib.metadata import version

    for text in on_ranks(2, with_other_version)[0]:
        assert f"- vllm: {version('vllm')} on rank 0; 0.34.1 on rank 1." in text
        assert f"- triton: {version('triton')} on rank 0; 3.6.0 on rank 1." in text
        assert "- vLLM in the tested range: yes on rank 0; no on rank 1." in text


def without_package(rank, config):
    return None if rank == 2 else first_layer(config, wait_s=3.0)


def test_a_rank_that_runs_stock_is_missed_by_the_others():
    texts, _ = on_ranks(4, without_package, dcp=4)
    assert texts[2] is None
    for rank in (0, 1, 3):
        assert texts[rank].startswith(f"Rank {rank} stops")
        assert "- Rank 2 did not come within 3 s" in texts[rank]


def other_member(rank, config):
    return first_layer(config, member=rank)


@has_flash_attn_4
def test_ranks_that_selected_different_backends_are_told():
    for text in on_ranks(2, other_member)[0]:
        assert (
            "- backend: DcpFlashInferMLASparseImpl on rank 0; DcpFlashAttnMLASparseFA4Impl on "
            "rank 1." in text
        )


def own_limit(rank, config):
    config.additional_config["dcp_mla"]["merge_limit_bytes"] = 1_000_000 * (1 + rank // 2)
    return first_layer(config)


def test_engines_of_one_data_parallel_deployment_need_not_agree():
    texts, left = on_ranks(4, own_limit, dcp=2, dp=2)
    assert texts == [None] * 4
    assert left == [[]] * 4


def off(rank, config):
    from vllm_dcp_mla import agreement

    with mock.patch.object(agreement, "compare", side_effect=AssertionError):
        return first_layer(config)


def test_an_engine_without_dcp_says_nothing():
    assert on_ranks(2, off, dcp=1) == ([None, None], [[], []])


def test_what_is_said_is_small(cpu_vllm):
    from vllm_dcp_mla.agreement.fingerprint import rank_fingerprint

    assert len(json.dumps(rank_fingerprint(make_config(4), 0, {}))) < 4096
