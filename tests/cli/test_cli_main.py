import json
import os
import re
import subprocess
import sys

import pytest

from vllm_dcp_mla import __version__
from vllm_dcp_mla.cli.main import main


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"vllm-dcp-mla {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_names_the_commands(capsys, arguments):
    """Each with all of a sentence."""
    assert main(arguments) == 0
    out = capsys.readouterr().out
    _, _, listed = out.partition("Commands:\n")
    commands = [line.split(maxsplit=1) for line in listed.splitlines()]
    assert [name for name, _ in commands] == ["doctor", "plan", "selftest", "rehearse", "bench"]
    assert all(said.endswith(".") and not said.endswith("..") for _, said in commands)


def test_an_unknown_command_is_one_sentence(capsys):
    assert main(["launch"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert "launch" in said.err


@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_an_unknown_flag_goes_to_the_json_too(capsys, command):
    assert main([command, "--json", "--no-such-flag"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False
    assert "--no-such-flag" in answer["problems"][0]


def test_importing_needs_neither_torch_nor_vllm():
    program = (
        "import sys\n"
        "for name in ('torch', 'vllm', 'flashinfer', 'triton'): sys.modules[name] = None\n"
        "from vllm_dcp_mla.cli.main import main\n"
        "sys.exit(main(['plan']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "951,058,432" in done.stdout


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_closed_pipe_makes_no_noise(flags):
    program = "import sys; from vllm_dcp_mla.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "plan", *flags]
    # Output that is written at once would not fail at the end, as it does for users.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=env) as process:
        process.stdout.close()
        assert process.stderr.read() == b""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("arguments", [["plan"], ["plan", "--json"], ["--help"], ["--version"]])
def test_a_full_disk_behind_standard_output_is_said(arguments):
    program = "import sys; from vllm_dcp_mla.cli.main import main; sys.exit(main())"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 1
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("standard output cannot be written: No space left on device")


def test_a_closed_standard_output_is_said(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["plan"]) == 1
    assert capsys.readouterr().err.startswith("standard output is closed")


def test_what_the_machine_refuses_is_one_sentence(capsys, monkeypatch):
    from vllm_dcp_mla.cli import plan

    def refuse(*_):
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(plan, "_one", refuse)
    assert main(["plan"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "No usable temporary directory found in ['/tmp']" in line


@pytest.mark.parametrize("columns", ["0", "20", "40"])
def test_a_narrow_terminal_loses_no_figure(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["plan", "--sweep", "dcp=4,8"]) == 0
    said = capsys.readouterr().out
    assert len(re.findall(r"\d,\d{3},\d{3}", said)) == 2
    assert "\u2026" not in said
