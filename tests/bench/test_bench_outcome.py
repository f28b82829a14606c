import json

import pytest

torch = pytest.importorskip("torch")
from rich.console import Console  # noqa: E402

from release_marks import serves_hopper  # noqa: E402
from vllm_dcp_mla.bench import plot, report, run  # noqa: E402
from vllm_dcp_mla.bench.rows import Row  # noqa: E402
from vllm_dcp_mla.bench.works import WORKS  # noqa: E402
from vllm_dcp_mla.planner import picture  # noqa: E402
from vllm_dcp_mla.planner.request import RequestError  # noqa: E402

MACHINE = {
    "gpu": "H200", "bandwidth_tb_s": 4.3, "bf16_tflop_s": 790, "versions": {"vllm": "0.33.0"},
    "cpu_cores": 2,
}  # fmt: skip
SIZES = {"rows": 512, "heads": 64, "cache": "bf16"}


def outcome(*rows, works=("attention",)):
    return run.Outcome(MACHINE, [WORKS[name] for name in works], list(rows))


def attention(tokens, us, provider="flashmla"):
    return Row(
        "attention", f"{tokens} tokens", provider, us=us, spread=0.01, floor_us=us / 2,
        sizes={"tokens": tokens, **SIZES},
    )  # fmt: skip


@pytest.mark.vllm
@serves_hopper
@pytest.mark.usefixtures("cpu_vllm")
def test_every_work_names_its_module_and_is_listed_once():
    for name, work in WORKS.items():
        assert work.name == name
        assert callable(work.runner())
        assert work.title


def test_json_has_the_keys_that_other_tools_read():
    found = report.as_json(outcome(attention(1, 20.0), Row("attention", "x", "y", note="not here")))
    assert json.loads(json.dumps(found)) == found
    assert found["machine"] == MACHINE
    assert found["rows"][0] == {
        "work": "attention", "shape": "1 tokens", "provider": "flashmla", "us": 20.0,
        "spread": 0.01, "floor_us": 10.0, "sizes": {"tokens": 1, **SIZES},
    }  # fmt: skip
    assert found["rows"][1]["us"] is None
    assert found["rows"][1]["note"] == "not here"


def test_what_was_not_measured_is_said():
    said = outcome(works=("attention", "split")).not_measured
    assert any("trtllm-gen" in s for s in said)
    left = "step, prefill, launches, metadata, startup, growth, tilings"
    assert f"Works that did not run: {left}." in said
    assert "collectives between GPUs" in said[-1]


def test_the_table_shows_columns_that_are_filled():
    rows = [attention(1, 20.0), Row("attention", "x", "y", problem="it is off")]
    counted = Row("launches", "z", "stock", counted={"launches": 5.0})
    made = outcome(*rows, counted, works=("attention", "launches"))
    made.fits = [{"line": "tokens", "provider": "p", "fixed_us": 1.5}]
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in report.tables(made):
        console.print(table)
    text = console.export_text()
    assert "50%" in text
    assert "WRONG: it is off" in text
    first, second = text.split("launches: ")
    assert "spread" in first
    assert "spread" not in second.split("us = fixed")[0]
    assert "H200" in report.machine_line(MACHINE)


def test_a_wrong_provider_and_a_work_that_fails_are_problems_and_the_others_go_on(monkeypatch):
    def wrong(workbench):
        yield Row("attention", "x", "y", problem="it is off")
        raise RuntimeError("no luck")

    def good(workbench):
        yield attention(1, 2.0)

    runners = {"attention": wrong, "split": good}
    monkeypatch.setattr(type(WORKS["split"]), "runner", lambda self: runners[self.name])
    made = outcome(works=("attention", "split"))
    notes = []
    for work in made.works:
        run._run_work(work, None, made, notes.append)
    assert made.problems == [
        "attention, x, y is wrong: it is off.",
        "attention did not end: RuntimeError: no luck",
    ]
    assert not made.ok
    assert len(made.rows) == 2
    assert any("attention: x, y: it is off" in n for n in notes)
    assert "attention: 1 tokens, flashmla: 2.0 us (spread 1.0%), floor 1.0" in notes


def test_what_is_missing_names_the_works_and_what_can_run(monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = run.missing([WORKS["attention"], WORKS["metadata"]])
    if run.installed_release() is run.RELEASES[-1]:
        assert said[0].startswith("attention: needs a Hopper GPU (compute capability 9.0), torch")
        assert said[-1] == "What can run here: --work launches,metadata,startup."
        assert run.missing([WORKS["metadata"]]) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "B200")
    assert "B200 has capability 10.0" in " ".join(run.missing([WORKS["attention"]]))


def test_a_gpu_that_others_fill_is_said(monkeypatch):
    from vllm_dcp_mla.bench import machine

    def full(device):
        raise torch.OutOfMemoryError("CUDA out of memory. 2.00 GiB wanted.\nmore")

    monkeypatch.setattr(machine, "measure_ceilings", full)
    with pytest.raises(run.BenchError, match=r"GPU: CUDA out of memory\. .* wanted\. End what"):
        run._ceilings(torch.device("cpu"))


def test_panels_have_several_sizes():
    rows = [attention(n, 10.0 * n, p) for n in (1, 8) for p in ("flashmla", "triton_decode")]
    single = Row("attention", "x", "y", us=1, sizes={"tokens": 1, **SIZES, "rows": 9})
    found = plot.panels([*rows, single, Row("launches", "a", "b", us=1)])
    assert list(found) == ["attention: bf16, 512 rows, 64 heads"]
    assert found["attention: bf16, 512 rows, 64 heads"]["flashmla"] == [(1, 10, 5), (8, 80, 40)]


@pytest.mark.parametrize("suffix", picture.SUFFIXES)
def test_one_page_is_drawn(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    growth = [
        Row("growth", "", "p", us=10.0 / n, sizes={"line": "ranks", "units": n}) for n in (1, 2, 8)
    ]
    made = outcome(attention(1, 10.0), attention(8, 20.0), *growth)
    made.fits = [
        {"line": "ranks", "unit": "1 / ranks", "provider": "p", "fixed_us": 0.1, "per_unit_us": 9.9}
    ]
    file = tmp_path / f"page{suffix}"
    plot.check_target(str(file))
    assert plot.draw(made, str(file)) is None
    assert file.stat().st_size > 1000
    assert plot.draw(outcome(), str(file)).startswith("Nothing was drawn")


@pytest.mark.parametrize(("file", "said"), [("x.txt", "ends with"), ("/nowhere/x.png", "no such")])
def test_a_page_that_cannot_be_written_is_refused_before_anything_is_measured(file, said):
    with pytest.raises(RequestError, match=said):
        plot.check_target(file)
