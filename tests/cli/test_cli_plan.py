import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_dcp_mla.cli.main import main

TOPOLOGY = {"tp", "pcp", "dcp", "gpu", "kv_cache_dtype"}
WORKSPACE = {"heads", "tokens_per_launch", "slab_bytes", "total_bytes", "stock_total_bytes"}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    monkeypatch.delenv("VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE", raising=False)
    monkeypatch.delenv("VLLM_DCP_MLA_SLAB_LIMIT_BYTES", raising=False)


def plan(capsys, *flags):
    status = main(["plan", *flags])
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err
    return status, said


def plan_json(capsys, *flags):
    status, said = plan(capsys, "--json", *flags)
    assert said.err == ""
    answer = json.loads(said.out)
    assert set(answer) == {"ok", "problems", "topology", "workspace", "lines", "flags"}
    assert set(answer["topology"]) == TOPOLOGY
    assert set(answer["workspace"]) == WORKSPACE
    assert answer["ok"] == (status == 0) == (answer["problems"] == [])
    return status, answer


def test_the_table_stands_beside_stock(capsys):
    status, said = plan(capsys)
    assert (status, said.err) == (0, "")
    for text in ("951,058,432", "1,487,929,344", "0.886 GiB", "FLASHINFER_MLA_SPARSE"):
        assert text in said.out
    assert "--tensor-parallel-size 8 --decode-context-parallel-size 8" in said.out


def test_the_table_fits_a_pipe(capsys):
    _, said = plan(capsys, "--model", "deepseek-v3.2", "--max-num-batched-tokens", "1000000")
    table = [line for line in said.out.splitlines() if not line.startswith("Flags")]
    assert max(map(len, table)) <= 100


def test_json_has_the_figures(capsys):
    status, answer = plan_json(capsys, "--model", "deepseek-v3.2", "--comm", "a2a")
    assert status == 0
    assert answer["topology"] == {
        "tp": 8,
        "pcp": 1,
        "dcp": 8,
        "gpu": "b200",
        "kv_cache_dtype": "bfloat16",
    }
    assert answer["workspace"]["total_bytes"] == 951_058_432
    assert {tuple(line) for line in answer["lines"]} == {
        ("name", "bytes", "stock_bytes", "profiled")
    }


def test_hopper_gets_no_blackwell_figures(capsys):
    status, said = plan(capsys, "--gpu", "h200", "--kv-cache-dtype", "fp8_ds_mla")
    assert status == 0
    assert "no trtllm-gen workspace" in said.out
    assert "951" not in said.out


@pytest.mark.parametrize(
    ("flags", "status"),
    [
        (["--dcp", "0"], 1),
        (["--dcp", "-1"], 1),
        (["--dcp", "3"], 1),
        (["--dcp", "16"], 1),
        (["--tp", "7"], 1),
        (["--max-num-batched-tokens", "-1"], 1),
        (["--max-num-batched-tokens", "99999999999"], 1),
        (["--gpu", "h200", "--kv-cache-dtype", "nvfp4_ds_mla"], 1),
        (["--tp", "eight"], 2),
        (["--gpu", "a100"], 2),
        (["--model", "gpt-2"], 2),
        (["--kv-cache-dtype", "fp3"], 2),
        (["--comm", "nccl"], 2),
        (["--no-such-flag"], 2),
        (["--tp"], 2),
    ],
)
def test_what_does_not_work_is_said_in_sentences(capsys, flags, status):
    got, said = plan(capsys, *flags)
    assert got == status
    assert said.out == ""
    assert all(line.endswith(".") for line in said.err.splitlines())
    if flags != ["--tp"]:
        assert plan_json(capsys, *flags)[0] == status


@pytest.mark.parametrize("value", ["2GiB", "0", "-5", ""])
def test_a_workspace_size_that_is_no_number_names_its_variable(capsys, monkeypatch, value):
    monkeypatch.setenv("VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE", value)
    status, said = plan(capsys)
    assert status == 2
    assert said.err.startswith("VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE")
    assert plan_json(capsys)[0] == 2


def test_the_environment_is_honoured(capsys, monkeypatch):
    monkeypatch.setenv("VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE", "104857600")
    assert plan_json(capsys)[1]["workspace"]["tokens_per_launch"] == 280
    monkeypatch.setenv("VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE", "1000")
    assert plan_json(capsys)[0] == 1
    monkeypatch.delenv("VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE")
    monkeypatch.setenv("VLLM_DCP_MLA_SLAB_LIMIT_BYTES", str(10 * 64 * 2048 + (1 << 20)))
    assert plan_json(capsys)[1]["workspace"]["tokens_per_launch"] == 10
    monkeypatch.setenv("VLLM_DCP_MLA_SLAB_LIMIT_BYTES", "much")
    assert plan_json(capsys)[0] == 2


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    texts=st.dictionaries(
        st.sampled_from(
            [
                *("--model", "--gpu", "--tp", "--pcp", "--dcp", "--kv-cache-dtype", "--comm"),
                "--max-num-batched-tokens",
            ]
        ),
        st.one_of(st.integers().map(str), st.text(max_size=8)),
    )
)
def test_no_text_makes_a_traceback(capsys, texts):
    flags = [part for flag, text in texts.items() for part in (flag, text)]
    assert plan_json(capsys, *flags)[0] in (0, 1, 2)
