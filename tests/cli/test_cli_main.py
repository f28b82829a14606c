import json
import os
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
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "doctor" in out
    assert "plan" in out


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
