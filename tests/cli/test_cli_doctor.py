import importlib.util
import json
import os
import subprocess
import sys

import pytest

from vllm_dcp_mla.cli.main import main
from vllm_dcp_mla.doctor import examine as examine_module
from vllm_dcp_mla.doctor import selection as selection_module
from vllm_dcp_mla.doctor.processes import Probed
from vllm_dcp_mla.plugin import alias, overrides
from vllm_dcp_mla.simulate.selection import Answer, SelectionError

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
OURS = "vllm_dcp_mla.backends.trtllm.DcpFlashInferMLASparseBackend"


@pytest.fixture
def quick(monkeypatch):
    """No processes: probes that say nothing, and a selection that the test sets."""
    asked = []

    def answer_with(answer):
        def ask(question):
            asked.append(question)
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(selection_module, "ask", ask)

    monkeypatch.setattr(examine_module, "run_probe", lambda *args: Probed({}, "not run"))
    monkeypatch.setattr(examine_module, "installed_version", lambda name: "0.33.0")
    answer_with(Answer("FLASHINFER_MLA_SPARSE", OURS, "fp8_e4m3", 8, {"OTHER": ["a reason"]}))
    answer_with.asked = asked
    return answer_with


def doctor_json(capsys, *flags):
    status = main(["doctor", "--json", *flags])
    said = capsys.readouterr()
    assert said.err == ""
    report = json.loads(said.out)
    assert {"ok", "checks", "selection"} <= set(report)
    assert set(report["selection"]) == {"picked", "class", "refused"}
    for check in report["checks"]:
        assert set(check) == {"name", "status", "found", "expected", "fix"}
        assert check["status"] in ("pass", "warn", "fail")
        assert bool(check["fix"]) == (check["status"] != "pass"), check
    assert report["ok"] == (status == 0)
    return status, report


def by_name(report, name):
    return [check for check in report["checks"] if check["name"] == name]


def test_the_selection_is_reported(capsys, quick):
    _, report = doctor_json(capsys, "--attention-backend", "X", "--comm", "ag_rs")
    assert report["selection"] == {
        "picked": "FLASHINFER_MLA_SPARSE",
        "class": OURS,
        "refused": {"OTHER": ["a reason"]},
    }
    assert by_name(report, "selection")[0]["status"] == "pass"
    (question,) = quick.asked
    assert (question.gpu, question.backend, question.comm) == ("b200", "X", "ag_rs")


@pytest.mark.parametrize(
    "answer",
    [
        SelectionError("vLLM would not have it"),
        Answer(None, None, "auto", 8, {}, "no valid backend"),
    ],
)
def test_no_backend_fails(capsys, quick, answer):
    quick(answer)
    status, report = doctor_json(capsys)
    (check,) = by_name(report, "selection")
    assert (status, check["status"]) == (1, "fail")
    assert check["found"] in ("vLLM would not have it", "no valid backend")


def test_the_alias_of_newer_releases_is_translated(capsys, quick, monkeypatch):
    monkeypatch.setattr(selection_module, "alias", lambda: "CUSTOM")
    quick(SelectionError("Unknown attention backend"))
    _, report = doctor_json(capsys, "--attention-backend", "DCP_MLA_SPARSE")
    assert by_name(report, "selection")[0]["fix"].endswith("--attention-backend CUSTOM")


def test_reasons_are_said_once(capsys, quick):
    quick(Answer(None, None, "auto", 8, {"OURS": ["no heads"]}, "none valid: OURS: [no heads]"))
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.count("no heads") == 1
    _, report = doctor_json(capsys, "--attention-backend", "OURS")
    assert "none valid" in by_name(report, "selection")[0]["found"]


def test_no_selection_asks_nothing(capsys, quick):
    _, report = doctor_json(capsys, "--no-selection")
    assert quick.asked == []
    assert by_name(report, "selection") == []
    assert report["selection"]["picked"] is None


@pytest.mark.parametrize("flags", [["--dcp", "3"], ["--dcp", "3", "--no-selection"]])
def test_an_impossible_topology_does_not_start_vllm(capsys, quick, flags):
    status, report = doctor_json(capsys, *flags)
    assert (status, quick.asked) == (1, [])
    assert report["checks"][0]["name"] == "configuration"
    assert "--decode-context-parallel-size is 3" in report["checks"][0]["found"]
    assert len(report["checks"]) > 10


def test_a_model_without_an_indexer_is_a_failed_check(capsys, quick, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    status, report = doctor_json(capsys, "--model", str(tmp_path))
    assert (status, quick.asked) == (1, [])
    assert "index_topk" in report["checks"][0]["found"]


@pytest.mark.parametrize("flags", [["--tp", "x"], ["--gpu", "a100"], ["--model", "gpt-2"]])
def test_what_cannot_be_read_is_status_2(capsys, quick, flags):
    status, report = doctor_json(capsys, *flags)
    assert (status, report["checks"], len(report["problems"])) == (2, [], 1)
    assert main(["doctor", *flags]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_local_without_a_gpu_says_so(capsys, quick, monkeypatch):
    monkeypatch.setattr("vllm_dcp_mla.planner.local_gpu._LIBRARY", "no-such-driver.so")
    status, report = doctor_json(capsys, "--gpu", "local")
    assert (status, quick.asked) == (1, [])
    assert "no NVIDIA driver" in by_name(report, "selection")[0]["found"]


def test_brackets_are_no_markup(capsys, quick, monkeypatch):
    monkeypatch.setattr(examine_module, "installed_version", lambda name: None)
    main(["doctor"])
    assert "pip install 'vllm-dcp-mla[vllm]'" in capsys.readouterr().out


def test_without_vllm_the_rest_is_still_said(capsys, quick, monkeypatch):
    monkeypatch.setattr(examine_module, "installed_version", lambda name: None)
    status, report = doctor_json(capsys)
    assert (status, quick.asked) == (1, [])
    assert by_name(report, "selection")[0]["fix"] == "pip install 'vllm-dcp-mla[vllm]'"
    assert by_name(report, "VLLM_PLUGINS")


def test_the_table_is_legible_in_a_pipe(capsys, quick):
    main(["doctor"])
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert max(map(len, lines)) <= 100
    for text in ("NAME", "FOUND / FIX", "NOT PICKED", "a reason", "vLLM picks FLASH"):
        assert text in said.out


def run_doctor(*flags, **environ):
    program = "import sys; from vllm_dcp_mla.cli.main import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, "doctor", "--json", *flags],
        capture_output=True,
        text=True,
        env={**os.environ, **environ},
    )


@pytest.mark.parametrize(
    ("name", "breaks"),
    [
        ("vllm", "raise RuntimeError('half an installation')"),
        ("torch", "raise OSError('libcudart.so.13: cannot open shared object file')"),
        ("flashinfer", "def broken(:"),
    ],
)
def test_the_report_prints_with_a_broken_library(tmp_path, name, breaks):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(breaks)
    done = run_doctor("--no-selection", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (1, "")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert len(checks) > 15
    if name == "torch":
        assert "libcudart" in checks["torch imports"]["found"]
    if name == "vllm":
        assert checks["coupled symbols"]["status"] == "fail"
    if name == "flashinfer":
        assert checks["FlashInfer signature"]["status"] == "fail"


@pytest.mark.slow
@pytest.mark.vllm
@needs_vllm
def test_stock_vllm_picks_ours():
    done = run_doctor("--kv-cache-dtype", "fp8_e4m3")
    report = json.loads(done.stdout)
    assert [c for c in report["checks"] if c["status"] == "fail"] == []
    assert done.returncode == 0
    assert report["selection"]["picked"] == "FLASHINFER_MLA_SPARSE"
    assert report["selection"]["class"] == OURS
    assert "FLASHMLA_SPARSE" in report["selection"]["refused"]


@pytest.mark.slow
@pytest.mark.vllm
@needs_vllm
def test_a_plugin_that_is_left_out_is_found_out():
    done = run_doctor("--no-selection", VLLM_PLUGINS="lora_filesystem_resolver")
    report = json.loads(done.stdout)
    failed = {c["name"] for c in report["checks"] if c["status"] == "fail"}
    assert failed == {"VLLM_PLUGINS", *(f"backend {name}" for name in (*overrides(), alias()))}
    assert done.returncode == 1


@pytest.mark.slow
@pytest.mark.vllm
@needs_vllm
def test_a_plugin_that_is_switched_off_only_warns():
    done = run_doctor("--no-selection", VLLM_DCP_MLA_DISABLE="1")
    report = json.loads(done.stdout)
    warned = {c["name"] for c in report["checks"] if c["status"] == "warn"}
    assert {"settings", "backend FLASHINFER_MLA_SPARSE"} <= warned
    assert done.returncode == 0
