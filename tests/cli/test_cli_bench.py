import json
from types import SimpleNamespace

import pytest

from vllm_dcp_mla.bench import run
from vllm_dcp_mla.bench.rows import Row
from vllm_dcp_mla.bench.works import WORKS
from vllm_dcp_mla.cli.main import main
from vllm_dcp_mla.planner.request import RequestError

MACHINE = {"gpu": None, "cpu_cores": 2, "versions": {"vllm": "0.33.0"}}


@pytest.fixture
def measured(monkeypatch):
    """A run that measures nothing; what it was asked for, and what it is to say."""
    asked = SimpleNamespace(works=None, quick=None, rows=[], problems=[])

    def run_bench(works, *, quick, note):
        asked.works, asked.quick = [w.name for w in works], quick
        note("measuring")
        return run.Outcome(MACHINE, works, list(asked.rows), list(asked.problems))

    monkeypatch.setattr(run, "run_bench", run_bench)
    return asked


def test_all_but_the_sweep_of_tilings_by_default(measured, capsys):
    assert main(["bench"]) == 0
    assert measured.works == [name for name in WORKS if name != "tilings"]
    assert measured.quick is False
    assert "measuring" in capsys.readouterr().err


def test_named_works_run_in_the_lists_order(measured):
    assert main(["bench", "--work", "split, attention,split", "--quick"]) == 0
    assert measured.works == ["attention", "split"]
    assert measured.quick is True


@pytest.mark.parametrize("text", ["attention,nonsense", "", " , "])
def test_an_unknown_work_lists_those_that_are_known(text, capsys):
    assert main(["bench", "--work", text]) == 2
    said = capsys.readouterr().err
    assert "--work has" in said
    assert all(name in said for name in WORKS)


def test_json_alone_is_on_standard_output(measured, capsys):
    measured.rows = [Row("split", "s", "p", us=3.0, spread=0.0)]
    assert main(["bench", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"]
    assert answer["machine"] == MACHINE
    assert answer["rows"][0]["us"] == 3


def test_a_wrong_provider_fails_the_command(measured, capsys):
    measured.problems = ["attention, x, y is wrong: it is off."]
    assert main(["bench"]) == 1
    assert "y is wrong" in capsys.readouterr().out
    assert main(["bench", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"] == measured.problems


def test_what_this_machine_lacks_is_said_without_a_traceback(monkeypatch, capsys):
    monkeypatch.setattr(run, "missing", lambda works: ["attention: needs a Hopper GPU, none."])
    assert main(["bench"]) == 1
    seen = capsys.readouterr()
    assert "attention: needs a Hopper GPU, none." in seen.err
    assert "Traceback" not in seen.err + seen.out
    assert main(["bench", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["problems"] == ["attention: needs a Hopper GPU, none."]
    assert answer["rows"] == []


def test_a_page_that_cannot_be_drawn_is_refused_first(measured, capsys):
    assert main(["bench", "--plot", "x.txt"]) == 2
    assert measured.works is None
    assert "--plot is 'x.txt'" in capsys.readouterr().err


def test_a_folder_is_no_page(measured, capsys, tmp_path):
    (folder := tmp_path / "x.png").mkdir()
    assert main(["bench", "--plot", str(folder)]) == 1
    assert measured.works is None
    assert "which is a folder; name a file" in capsys.readouterr().err


def test_what_was_measured_is_said_where_it_cannot_be_drawn(
    measured, capsys, tmp_path, monkeypatch
):
    pytest.importorskip("matplotlib")
    measured.rows = [Row("split", "s", "p", us=3.0, spread=0.0)]

    def draw(outcome, file):
        raise RequestError([f"--plot cannot write {file}: no space."], 1)

    monkeypatch.setattr("vllm_dcp_mla.bench.plot.draw", draw)
    assert main(["bench", "--json", "--plot", str(tmp_path / "x.png")]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["rows"][0]["us"] == 3
    assert "no space" in answer["problems"][0]


def test_nothing_to_draw_is_said(measured, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["bench", "--plot", str(tmp_path / "x.png")]) == 0
    assert "Nothing was drawn" in capsys.readouterr().out
