import importlib.util
import json
import os
import signal
import subprocess
import sys

import pytest

from vllm_dcp_mla.cli import rehearse as module
from vllm_dcp_mla.cli.main import main
from vllm_dcp_mla.models import load_config
from vllm_dcp_mla.rehearse import rehearsal
from vllm_dcp_mla.rehearse.config import SCORES
from vllm_dcp_mla.rehearse.judge import Case
from vllm_dcp_mla.rehearse.machine import LocalGpu, Machine, MachineError
from vllm_dcp_mla.rehearse.rehearsal import Outcome

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
GIB = 1 << 30
H200 = LocalGpu(name="NVIDIA H200", arch=(9, 0), total_bytes=141 * GIB, free_bytes=140 * GIB)
GOOD = Case("engine: runs", True, 0, 0, collectives=(3, 3), seconds=61.0)
BAD = Case("engine: to 512 tokens", False, 2.5, 1.5, ("too far.",))


class Ran(list):
    """What was asked, and what is answered."""

    cases = (GOOD,)


@pytest.fixture
def ran(monkeypatch):
    """A machine with an H200, and engines that need not run."""
    asked = Ran()

    def run(configurations, machine, options, progress):
        progress("engine: [/b] 3 of 9 requests")  # brackets are no markup
        asked.append((configurations, options))
        return Outcome(list(asked.cases), {"engine": {"ran": "Impl (reference)"}}, True, 61.2)

    here = Machine(gpus=(H200,), nccl=(2, 30, 3), versions={"torch": "2"})
    monkeypatch.setattr(module, "examine", lambda: here)
    monkeypatch.setattr(rehearsal, "rehearse", run)
    monkeypatch.setenv("VLLM_DCP_MLA_KERNEL", "reference")
    return asked


@pytest.fixture
def no_machine(monkeypatch):
    def examine():
        raise AssertionError("the machine must not be asked")

    monkeypatch.setattr(module, "examine", examine)


def rehearse_json(capsys, *flags):
    status = main(["rehearse", "--json", *flags])
    said = capsys.readouterr()
    assert said.err == ""
    report = json.loads(said.out)
    assert {"ok", "problems", "cases"} <= set(report)
    assert report["ok"] == (status == 0)
    return status, report


def test_a_good_rehearsal(capsys, ran):
    status, report = rehearse_json(capsys, "--tp", "4", "--dcp", "2", "--comm", "a2a")
    assert report["scores"] == "normal"
    assert status == 0
    (case,) = report["cases"]
    assert set(case) >= {
        *("name", "ok", "error", "limit", "collectives", "syncs", "late_compiles", "seconds"),
    }
    ((configurations, options),) = ran
    assert [(c.tp, c.dcp, c.comm, c.force_mqa) for c in configurations] == [
        (4, 2, "a2a", True),
        (4, 2, "a2a", False),
    ]
    assert options.engine_seconds == 600


@pytest.mark.parametrize("scores", SCORES)
def test_scores_arrive(ran, scores):
    assert main(["rehearse", "--scores", scores]) == 0
    ((_, options),) = ran
    assert options.scores == scores


def test_a_bad_case_is_status_1(capsys, ran):
    ran.cases = [GOOD, BAD]
    status, report = rehearse_json(capsys)
    assert (status, report["problems"]) == (1, ["too far."])


def test_the_table_is_legible_in_a_pipe(capsys, ran):
    ran.cases = [GOOD, BAD]
    assert main(["rehearse"]) == 1
    said = capsys.readouterr()
    for text in ("NVIDIA H200; torch 2", "engine: runs", "WRONG", "1 of 2 cases are good, in 61 s"):
        assert text in said.out
    assert "engine: to 512 tokens: too far." in said.out
    assert "external_launcher" in said.out
    assert max(map(len, said.out.splitlines())) <= 100


def test_a_plugin_that_is_switched_off_has_nothing_to_rehearse(capsys, no_machine, monkeypatch):
    monkeypatch.setenv("VLLM_DCP_MLA_DISABLE", "1")
    status, report = rehearse_json(capsys)
    assert (status, len(report["problems"])) == (1, 1)
    assert report["problems"][0].startswith("VLLM_DCP_MLA_DISABLE is set")


BAD_FLAGS = [
    ("--tp", "x"),
    ("--dcp", ""),
    ("--mtp", "-1"),
    ("--graphs", "eager"),
    ("--soak", "-1"),
    ("--break", "everything"),
    ("--index-topk", "7"),
    ("--scores", "flat"),
    ("--ranks-per-gpu", "0"),
    ("--time-limit", "1"),
    ("--comm", "smoke"),
    ("--kv-cache-dtype", "int1"),
    ("--model", "gpt-2"),
]


@pytest.mark.parametrize("flags", BAD_FLAGS)
def test_what_cannot_be_read_is_status_2(capsys, no_machine, flags):
    status, report = rehearse_json(capsys, *flags)
    assert (status, report["cases"], len(report["problems"])) == (2, [], 1)
    assert report["problems"][0].startswith(f"{flags[0]} is {flags[1]!r}")
    assert main(["rehearse", *flags]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == report["problems"]


@pytest.mark.parametrize("flags", [["--nonsense"], ["--tp"], ["more"]])
def test_flags_that_do_not_exist_are_status_2(capsys, no_machine, flags):
    status, report = rehearse_json(capsys, *flags)
    assert (status, len(report["problems"])) == (2, 1)
    assert "vllm-dcp-mla rehearse --help" in report["problems"][0]


@pytest.mark.parametrize(
    "flags", [["--dcp", "3"], ["--tp", "1", "--dcp", "1"], ["--tp", "5"], ["--tp", "100000"]]
)
def test_impossible_sizes_are_status_1(capsys, no_machine, flags):
    status, report = rehearse_json(capsys, *flags)
    assert status == 1
    assert report["problems"]
    assert main(["rehearse", *flags]) == 1
    assert capsys.readouterr().err.splitlines() == report["problems"]


def test_a_folder_without_a_config_is_status_2(capsys, no_machine, tmp_path):
    status, report = rehearse_json(capsys, "--model", str(tmp_path))
    assert (status, len(report["problems"])) == (2, 1)
    assert "neither a folder with a config.json" in report["problems"][0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"index_topk": None}, "has no usable index_topk"),
        ({"architectures": ["LlamaForCausalLM"]}, "a rehearsal needs one of DeepseekV32"),
        ({"index_topk": 2040}, "selects 2040 keys"),
        ({"index_n_heads": 0}, "has no usable index_n_heads"),
    ],
)
def test_a_model_that_cannot_be_rehearsed_is_status_1(capsys, no_machine, tmp_path, change, said):
    """Said before the machine is looked at."""
    config = {**load_config("glm-5.2"), **change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, report = rehearse_json(capsys, "--model", str(tmp_path))
    assert (status, len(report["problems"])) == (1, 1)
    assert said in report["problems"][0]


def test_a_setting_that_cannot_be_is_status_1(capsys, no_machine, monkeypatch):
    monkeypatch.setenv("VLLM_DCP_MLA_KERNEL", "fastest")
    status, report = rehearse_json(capsys)
    assert (status, len(report["problems"])) == (1, 1)
    assert "VLLM_DCP_MLA_KERNEL" in report["problems"][0]


def test_what_the_machine_lacks_is_one_sentence(capsys, monkeypatch):
    def examine():
        raise MachineError("vLLM is not installed; run it.")

    monkeypatch.setattr(module, "examine", examine)
    status, report = rehearse_json(capsys)
    assert (status, report["problems"]) == (1, ["vLLM is not installed; run it."])


def test_a_gpu_that_nothing_serves(capsys, ran, monkeypatch):
    monkeypatch.setenv("VLLM_DCP_MLA_KERNEL", "auto")
    old = H200.model_copy(update={"name": "Old [one]", "arch": (7, 0)})
    monkeypatch.setattr(
        module, "examine", lambda: Machine(gpus=(old,), nccl=(2, 30, 3), versions={})
    )
    status, report = rehearse_json(capsys)
    assert (status, len(report["problems"]), list(ran)) == (1, 1, [])
    assert "Nothing serves this on Old [one]" in report["problems"][0]


def test_an_interrupt_is_status_130(capsys, ran, monkeypatch):
    def run(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(rehearsal, "rehearse", run)
    assert main(["rehearse"]) == 130


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_unwinds_as_an_interrupt_does(ran, monkeypatch, number, request):
    # Whoever runs the tests may ignore SIGHUP.
    theirs = signal.signal(number, signal.SIG_DFL)
    request.addfinalizer(lambda: signal.signal(number, theirs))
    before, unwound = signal.SIG_DFL, []

    def run(*arguments):
        try:
            os.kill(os.getpid(), number)
            raise AssertionError("this process goes on")
        finally:
            unwound.append(number)

    monkeypatch.setattr(rehearsal, "rehearse", run)
    with pytest.raises(SystemExit) as caught:
        main(["rehearse"])
    assert (caught.value.code, unwound) == (128 + number, [number])
    assert signal.getsignal(number) is before


def test_a_signal_that_is_ignored_stays_so(ran, monkeypatch):
    """As under nohup."""
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        monkeypatch.setattr(
            rehearsal,
            "rehearse",
            lambda *arguments: os.kill(os.getpid(), signal.SIGHUP) or Outcome([GOOD]),
        )
        assert main(["rehearse"]) == 0
    finally:
        signal.signal(signal.SIGHUP, handler)


def test_help_names_what_is_allowed(capsys):
    assert main(["rehearse", "--help"]) == 0
    said = capsys.readouterr().out
    for text in ("kill-serving", "piecewise", "--soak", "--cover", "512, 1024, 2048"):
        assert text in said


@pytest.mark.slow
@pytest.mark.vllm
@needs_vllm
def test_a_machine_without_a_gpu_says_so():
    program = "import sys; from vllm_dcp_mla.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, "rehearse", "--json"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert json.loads(done.stdout) == {
        "ok": False,
        "problems": [
            "torch sees no GPU here; a rehearsal needs one (vllm-dcp-mla selftest needs none)."
        ],
        "cases": [],
    }
