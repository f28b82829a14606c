"""What is recorded of a run, and how it is compared with what is committed."""

import json
import runpy
from types import SimpleNamespace

import pytest

import release_marks
import support
from release_marks import RELEASE
from vllm_dcp_mla.compat import releases
from vllm_dcp_mla.compat.releases import RELEASES


def report(nodeid, outcome, reason=""):
    return SimpleNamespace(
        nodeid=nodeid,
        when="call",
        passed=outcome == "passed",
        failed=outcome == "failed",
        skipped=outcome == "skipped",
        longrepr=("file", 1, f"Skipped: {reason}"),
    )


def test_a_run_is_recorded_by_suite(tmp_path, monkeypatch):
    monkeypatch.setattr(support, "version", {"vllm": "0.29.0"}.get)
    recorder = support.Recorder(tmp_path / "deep" / "outcome.json")
    for arguments in (
        ("tests/selftest/test_selftest.py::t", "passed"),
        ("tests/test_merge.py::t", "passed"),
        ("tests/test_merge.py::u", "failed"),
        ("tests/test_merge.py::v", "skipped", f"vLLM {RELEASE.series}: no such thing"),
        ("tests/test_merge.py::w", "skipped", "no GPU"),
    ):
        recorder.pytest_runtest_logreport(report(*arguments))
    recorder.pytest_sessionfinish()
    (outcome,) = json.loads((tmp_path / "deep" / "outcome.json").read_text()).values()
    assert (outcome["unit"], outcome["selftest"], outcome["selection"]) == (False, True, None)
    assert outcome["lacks"] == ["no such thing"]


@pytest.mark.parametrize("release", RELEASES, ids=lambda r: r.series)
def test_marks_say_one_thing_of_pcp_and_what_is_committed(monkeypatch, release):
    monkeypatch.setattr(releases, "installed_version", lambda name: f"{release.series}.0")
    marks = [
        value.mark
        for value in runpy.run_path(release_marks.__file__).values()
        if isinstance(value, pytest.MarkDecorator)
    ]
    prefix = f"vLLM {release.series}: "
    said = {m.kwargs["reason"].removeprefix(prefix) for m in marks if m.args[0]}
    lacks = support.load()[f"{release.series}.0"]["lacks"]
    assert said <= set(lacks)
    assert sum(text.startswith("PCP with DCP") for text in lacks) == (release.minor < 33)


def test_another_outcome_than_the_committed_one_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(support, "COMMITTED", tmp_path / "support.json")
    monkeypatch.setattr(support.load, "__defaults__", (tmp_path / "support.json",))
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps({"0.30.0": {"unit": True}}))
    bad.write_text(json.dumps({"0.30.0": {"unit": False}, "0.29.0": {"unit": True}}))
    assert support.main([str(good)]) == 1  # nothing is committed yet
    assert support.main(["--write", str(good)]) == 0
    assert support.main([str(good)]) == 0
    assert support.main([str(bad)]) == 1
    said = capsys.readouterr().err
    assert "vLLM 0.30.0: unit is False, and True in support.json" in said
    assert "vLLM 0.29.0: unit is True, and None" in said
    assert "--write" in said
    support.main(["--write", str(bad)])
    assert list(json.loads((tmp_path / "support.json").read_text())) == ["0.29.0", "0.30.0"]
