import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_dcp_mla.cli.main import main
from vllm_dcp_mla.planner.plot import segments

TOPOLOGY = {"tp", "pcp", "dcp", "gpu", "kv_cache_dtype"}
KEYS = {"ok", "problems", "topology", "workspace", "lines", "kv", "utilization", "flags"}
KV = {"bytes_per_token", "budget_bytes", "tokens_per_rank", "tokens_logical", "block_tokens"}
UTILIZATION = {"requested", "max_safe", "without_graphs", "to_keep_kv"}
LINE = {"name", "bytes", "stock_bytes", "profiled"}
#: What vllm-project/vllm#55879 logged.
NEGATIVE = ("--total-gib", "178.35", "--non-kv-gib", "161.16", "--graphs-gib", "6.15")
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
    assert set(answer) >= KEYS
    assert set(answer["kv"]) >= KV
    assert set(answer["utilization"]) == UTILIZATION
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
    _, said = plan(capsys, "--model", "deepseek-v3.2", "--max-num-batched-tokens", "100000")
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
    assert all(set(line) >= LINE for line in answer["lines"])
    kv = answer["kv"]
    assert kv["tokens_logical"] == 8 * kv["tokens_per_rank"]
    assert kv["block_tokens"] == 8 * 64
    counted = sum(line["bytes"] for line in answer["lines"] if line["profiled"])
    assert answer["memory"]["requested_bytes"] - counted == kv["budget_bytes"]


def test_hopper_gets_no_blackwell_figures(capsys):
    flags = ("--gpu", "h200", "--kv-cache-dtype", "fp8_ds_mla", "--comm", "ag_rs")
    status, said = plan(capsys, *flags)
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
        (["--model", "glm-5.2"], 1),
        (["--utilization", "0.3"], 1),
        (["--utilization", "1"], 1),
        (["--max-model-len", "9999999"], 1),
        (["--max-num-seqs", "0"], 1),
        (["--block-size", "16"], 1),
        (["--mtp", "x"], 2),
        (["--context", "many"], 2),
        (["--graphs-gib", "-1"], 2),
        (["--total-gib", "none"], 2),
        (["--total-gib", "0"], 2),
        (["--kv-gib", "3"], 2),
        (["--no-such-flag"], 2),
        (["--tp"], 2),
    ],
)
def test_what_does_not_work_is_said_in_sentences(capsys, flags, status):
    got, said = plan(capsys, *flags)
    assert got == status
    assert said.err
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
                *("--max-num-batched-tokens", "--max-model-len", "--max-num-seqs", "--block-size"),
                *("--utilization", "--mtp", "--context", "--total-gib", "--graphs-gib"),
                *("--autotune-gib", "--kv-gib", "--non-kv-gib", "--free-gib"),
            ]
        ),
        st.one_of(st.integers().map(str), st.text(max_size=8)),
    )
)
def test_no_text_makes_a_traceback(capsys, texts):
    flags = [part for flag, text in texts.items() for part in (flag, text)]
    assert plan_json(capsys, *flags)[0] in (0, 1, 2)


def test_the_figures_of_a_log_are_planned_with(capsys):
    status, answer = plan_json(capsys, *NEGATIVE)
    assert status == 1
    assert round(answer["kv"]["budget_bytes"] / 2**30, 2) == -3.23
    assert answer["utilization"]["to_keep_kv"] == 0.9545
    assert all(set(line) >= LINE for line in answer["lines"])
    status, said = plan(capsys, *NEGATIVE, "--utilization", "0.96")
    assert status == 0
    assert "3.906" in said.out
    assert plan_json(capsys, *NEGATIVE, "--utilization", "0.96")[1]["ok"]


def test_requests_are_counted_at_a_context(capsys):
    requests = [
        plan_json(capsys, *(["--context", length] if length else []))[1]["kv"]["requests"]
        for length in (None, "1048576", "131072")
    ]
    assert requests[0] == requests[1]
    assert requests[2] == pytest.approx(8 * requests[1], rel=0.01)


def test_a_refused_plan_still_shows_its_lines(capsys):
    status, said = plan(capsys, "--model", "glm-5.2")
    assert status == 1
    assert "weights: routed experts" in said.out
    assert "Flags:" not in said.out
    assert "The largest lines:" in said.err


def test_a_sweep_is_one_line_a_value(capsys):
    # Older releases have a bf16 cache by default.
    fp8 = ("--kv-cache-dtype", "fp8_e4m3")
    status, said = plan(capsys, *fp8, "--sweep", "dcp=1,2,8,3")
    assert status == 0
    rows = [line.split()[1:4:2] for line in said.out.splitlines() if line.startswith("│")]
    assert rows == [["1", "yes"], ["2", "yes"], ["8", "yes"], ["3", "no"]]
    assert "--dcp 3: --decode-context-parallel-size is 3" in said.err
    status = main(["plan", *fp8, "--sweep", "dcp=1,8", "--json"])
    swept = json.loads(capsys.readouterr().out)
    assert (status, swept["sweep"]) == (0, "dcp")
    assert [row["value"] for row in swept["plans"]] == ["1", "8"]
    tokens = [row["kv"]["tokens_logical"] for row in swept["plans"]]
    assert 7 < tokens[1] / tokens[0] < 8


def test_a_sweep_of_figures(capsys):
    figures = ("--total-gib", "178.35", "--kv-gib", "33.46", "--free-gib", "7.6")
    status = main(
        ["plan", *figures, "--autotune-gib", "12.22", "--sweep", "utilization=0.92,0.85", "--json"]
    )
    swept = json.loads(capsys.readouterr().out)
    assert status == 0
    assert [row["ok"] for row in swept["plans"]] == [False, True]


def test_a_sweep_in_which_nothing_works_fails(capsys):
    assert plan(capsys, "--sweep", "dcp=3,5")[0] == 1


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("dcp", "0 values"),
        ("dcp=", "0 values"),
        ("colour=1", "'colour'"),
        ("=1", "''"),
        (f"dcp={','.join(map(str, range(40)))}", "40 values"),
    ],
)
def test_a_sweep_that_is_none_is_named(capsys, text, named):
    status, said = plan(capsys, "--sweep", text)
    assert status == 2
    assert named in said.err


def save(tmp_path, capsys, name, *flags):
    main(["plan", "--json", *flags])
    file = tmp_path / name
    file.write_text(capsys.readouterr().out)
    return str(file)


def test_two_plans_are_compared(capsys, tmp_path):
    files = [save(tmp_path, capsys, f"{dcp}.json", "--dcp", dcp) for dcp in ("4", "8")]
    status, said = plan(capsys, "--compare", *files)
    assert status == 0
    assert "kv.tokens_logical" in said.out
    assert "weights" not in said.out
    assert main(["plan", "--compare", *files, "--json"]) == 0
    found = {d["name"]: d for d in json.loads(capsys.readouterr().out)["differences"]}
    assert found["topology.dcp"] == {
        "name": "topology.dcp",
        "before": 4,
        "after": 8,
        "change": 4,
    }
    assert found["kv.tokens_logical"]["change"] > 0
    assert plan(capsys, "--compare", files[0], files[0])[1].out.endswith("plan the same.\n")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"ok": true}', "nul"])
def test_a_file_that_is_no_plan_is_named(capsys, tmp_path, content):
    good = save(tmp_path, capsys, "good.json")
    bad = tmp_path / "bad.json"
    bad.write_text(content)
    for files in ((good, str(bad)), (str(bad), good), (good, str(tmp_path))):
        status, said = plan(capsys, "--compare", *files)
        assert status == 2
        assert "plan --json" in said.err


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_plot_is_written(capsys, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    file = tmp_path / f"plot.{suffix}"
    assert plan(capsys, "--sweep", "dcp=1,8,3", "--plot", str(file))[0] == 0
    assert file.stat().st_size > 5000
    if suffix == "svg":
        text = file.read_text()
        assert "glm-5.2-fp8 on b200: tp 8, pcp 1" in text
        assert "KV cache" in text
        # The value that no plan is for has no bar.
        assert text.count("xtick_") == 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], None),
        (["--model", "glm-5.2"], "no KV cache"),
        (["--utilization", "1"], "does not fit"),
        (NEGATIVE, "no KV cache"),
    ],
)
def test_a_plot_says_what_does_not_fit(capsys, tmp_path, flags, said):
    pytest.importorskip("matplotlib")
    file = tmp_path / "plot.svg"
    plan(capsys, *flags, "--plot", str(file))
    written = {
        why for why in ("does not fit", "no KV cache") if f"<!-- {why} -->" in file.read_text()
    }
    assert written == ({said} if said else set())


@pytest.mark.parametrize(
    ("file", "status"), [("plot", 2), ("plot.gif", 2), ("no/such/folder/plot.png", 1)]
)
def test_a_plot_that_cannot_be_written_is_named(capsys, tmp_path, file, status):
    pytest.importorskip("matplotlib")
    got, said = plan(capsys, "--plot", str(tmp_path / file))
    assert got == status
    assert said.err.startswith("--plot")
    # What was asked for is said all the same, where it could be read.
    assert ("KV cache" in said.out) is (status == 1)


def test_json_says_what_was_not_drawn(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    status, answer = plan_json(capsys, "--plot", str(tmp_path / "none" / "plot.png"))
    assert (status, answer["ok"]) == (1, False)
    assert answer["problems"][0].startswith("--plot cannot write")
    assert answer["kv"]["budget_bytes"] > 0


def test_a_sweep_without_figures_says_why(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    status, said = plan(capsys, "--sweep", "dcp=3,5", "--plot", str(tmp_path / "plot.png"))
    assert status == 1
    assert "it must divide --tensor-parallel-size 8" in said.err
    assert "--plot has nothing to draw" in said.err


@pytest.mark.parametrize("swept", ["dcp=1,a", "comm=ag_rs,smoke"])
def test_a_swept_value_that_cannot_be_read_is_status_2(capsys, swept):
    status, said = plan(capsys, "--sweep", swept)
    assert (status, said.out) == (2, "")
    assert said.err.startswith(f"--{swept.partition('=')[0]} is {swept.rpartition(',')[2]!r}")


@pytest.mark.parametrize(
    "more",
    [
        ("--sweep", "dcp=1,2"),
        ("--plot", "a.png"),
        ("--model", "glm-5.2-fp8"),
        ("--tensor-parallel-size", "8"),
        ("--enforce-eager",),
    ],
)
def test_a_comparison_plans_nothing(capsys, more):
    status, said = plan(capsys, "--compare", "a.json", "b.json", *more)
    assert (status, said.out) == (2, "")
    named = {"--tensor-parallel-size": "--tp"}.get(more[0], more[0])
    assert f"leave {named} out" in said.err


@pytest.mark.parametrize(
    ("figures", "named"),
    [
        (("--kv-gib", "165"), "--kv-gib is 165.00 GiB, but vLLM plans with 164.68 GiB"),
        (("--kv-gib", "164", "--graphs-gib", "1"), "--kv-gib is 164.00 GiB"),
        (("--kv-gib", "60", "--free-gib", "14.4"), "--free-gib is 14.40 GiB, but no more than"),
    ],
)
def test_figures_that_no_start_has_are_refused(capsys, figures, named):
    status, said = plan(capsys, "--total-gib", "179", *figures)
    assert (status, said.out) == (1, "")
    assert said.err.startswith(named)


def test_graphs_are_free_until_they_are_captured(capsys):
    figures = ("--total-gib", "179", "--kv-gib", "60", "--graphs-gib", "1", "--free-gib", "14.4")
    assert plan(capsys, *figures)[0] == 0


def test_bars_are_as_tall_as_the_gpu(capsys):
    answer = plan_json(capsys)[1]
    heights = segments(answer)
    total = answer["memory"]["total_bytes"] / 2**30
    assert sum(heights.values()) == pytest.approx(total)
    assert all(height >= 0 for height in heights.values())
