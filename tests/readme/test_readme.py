"""The README says what the code does: its commands run, its tables and log lines are the code's."""

import ast
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from readme_tables import HEADS_PER_RANK, README, STEPS, updated

import vllm_dcp_mla
from vllm_dcp_mla import plan_workspace, stock_workspace_bytes
from vllm_dcp_mla.capability import TABLE, row, serving
from vllm_dcp_mla.compat.libraries import ASSUMED
from vllm_dcp_mla.compat.versions import TESTED
from vllm_dcp_mla.planner.request import RawRequest, read_request
from vllm_dcp_mla.plugin import ALIAS, OVERRIDES
from vllm_dcp_mla.settings import WORKSPACE_ENV
from vllm_dcp_mla.simulate.gpus import GPUS

ROOT = README.parent
TEXT = README.read_text()
PACKAGE = ROOT / "src" / "vllm_dcp_mla"

#: Beginnings of commands that are not run here, and why.
NOT_RUN = {
    "pip install": "changes the environment; the wheel and examples/setup.sh are tested",
    "pip uninstall": "changes the environment",
    "vllm serve": "needs GPUs and a checkpoint; tests/serve starts it without",
    "VLLM_DCP_MLA_DISABLE=1 vllm serve": "needs GPUs and a checkpoint",
    "vllm-dcp-mla rehearse": "needs a GPU; tests/gpu and tests/rehearse run it",
    "tests/run.sh": "runs this test",
}
#: Beginnings of commands that start vLLM; the others take a second.
STARTS_VLLM = ("vllm-dcp-mla doctor", "vllm-dcp-mla selftest")


@dataclass(frozen=True)
class Command:
    """A command of the README, and the output it shows."""

    line: str
    shown: str | None


def commands():
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    found = []
    for index, (language, content) in enumerate(blocks):
        if language != "bash":
            assert language == "text", f"a block of {language or 'no language'} is not checked"
            continue
        follows = blocks[index + 1] if index + 1 < len(blocks) else ("", "")
        shown = follows[1] if follows[0] == "text" else None
        for line in content.replace("\\\n", " ").splitlines():
            found.append(Command(" ".join(line.split()), shown))
    return found


def not_run(command):
    return [start for start in NOT_RUN if command.line.startswith(start)]


def params():
    for command in commands():
        if not not_run(command):
            marks = [pytest.mark.vllm, pytest.mark.slow]
            slow = command.line.startswith(STARTS_VLLM)
            yield pytest.param(command, id=command.line, marks=marks if slow else [])


def said_by(command):
    scripts = Path(sys.executable).parent
    assert (scripts / shlex.split(command.line)[0]).exists()
    return subprocess.run(
        ["bash", "-c", command.line],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={
            **{name: value for name, value in os.environ.items() if name != "COLUMNS"},
            "PATH": f"{scripts}:{os.environ['PATH']}",
        },
    )


@pytest.mark.parametrize("command", params())
def test_a_command_does_what_the_readme_shows(command):
    done = said_by(command)
    said = [line.rstrip() for line in (done.stdout + done.stderr).splitlines()]
    assert done.returncode == 0, done.stderr
    if command.shown is None:
        return
    shown = [line.rstrip() for line in command.shown.splitlines()]
    assert shown, f"nothing is shown for {command.line}"
    if command.line.startswith(STARTS_VLLM):  # only its last words are shown
        assert [line for line in said if line in shown] == shown
    else:
        assert said == shown


def test_every_command_is_run_or_has_a_reason_not_to_be():
    met = {start for command in commands() for start in not_run(command)}
    assert met == set(NOT_RUN)
    run = [command.line for command in commands() if not not_run(command)]
    assert all(line.startswith("vllm-dcp-mla ") for line in run)
    assert len(run) >= 3


def test_tables_are_the_codes():
    assert updated(TEXT) == TEXT, "run python tests/readme/readme_tables.py"


@pytest.mark.vllm
@pytest.mark.parametrize("heads", HEADS_PER_RANK.values())
@pytest.mark.parametrize("tokens", STEPS)
def test_the_stock_column_is_what_stock_computes(cpu_vllm, heads, tokens):
    from vllm.v1.attention.backends.mla import flashinfer_mla_sparse as stock

    assert stock._required_workspace_bytes(8, heads, tokens) == stock_workspace_bytes(
        heads, 8, tokens
    )


def test_log_lines_are_the_codes():
    templates = {
        "plugin.py": (vllm_dcp_mla.__version__, ", ".join((*OVERRIDES, ALIAS))),
        "device_buffer.py": ("cuda:0", "951,058,432", 951_058_432 / 2**30, 4096, 64),
    }
    assert plan_workspace(64, 8192).total_bytes == 951_058_432
    for file, arguments in templates.items():
        template, *_ = logged_at_info(PACKAGE / file)
        assert template % arguments in TEXT.splitlines()


def logged_at_info(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "logger.info":
            yield ast.literal_eval(node.args[0])


def test_everything_that_is_overridden_or_patched_is_named():
    section = TEXT.partition("## What is overridden")[2].partition("\n## ")[0]
    for name in (*OVERRIDES, ALIAS):
        assert f"`{name}`" in section
    assert {row.name for row in TABLE} == set(OVERRIDES)
    patching = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.match(r'"""Patch(es)?\b', path.read_text())
    }
    assert "compat/sleep.py" in patching
    named = set(re.findall(r"^\| `(\S+\.py)`", TEXT, re.MULTILINE))
    assert named >= patching | {"plugin.py"}
    assert all((PACKAGE / name).exists() for name in named)


def test_versions_and_sizes_are_the_codes():
    assert f"`{','.join(sorted(map(str, TESTED), reverse=True))}`" in TEXT
    assert WORKSPACE_ENV in TEXT
    assert plan_workspace(64, 8192, workspace_bytes=104_857_600).tokens_per_launch == 280
    assert re.search(r"104,857,600 bytes give launches of 280 tokens at 64 heads", TEXT)


@pytest.mark.parametrize("gpu", ["b200", "h200"])
def test_pcp_works_with_the_exchange_that_is_named(gpu):
    assert "With PCP, add `--dcp-comm-backend ag_rs`" in TEXT
    raw = RawRequest("glm-5.2", gpu, "1", "4", "4", "auto", "8192", "a2a")
    refused = read_request(raw).deployment(GPUS[gpu], ASSUMED, kernel="auto")
    assert serving(refused) is None
    assert row(serving(replace(refused, comm="ag_rs"))).ours


def test_files_that_are_named_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / target).exists(), target
    for name in re.findall(r"\b((?:tests|examples)/[\w/.]+\w)", TEXT):
        assert (ROOT / name).exists(), name


def test_the_readme_is_short():
    assert len(TEXT.splitlines()) <= 300
