"""The launch scripts: what they start, with which flags, and what they ask before."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_dcp_mla
from release_marks import RELEASE
from vllm_dcp_mla.cli.main import main
from vllm_dcp_mla.gather_plan import DEFAULT_GATHER_LIMIT_BYTES, plan_gather
from vllm_dcp_mla.workspace import plan_workspace

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LAUNCHES = sorted(EXAMPLES.glob("*200/*/launch.sh"))
SCRIPTS = sorted([*EXAMPLES.rglob("*.sh"), *ROOT.glob("tests/*.sh"), ROOT / ".ci" / "run"])
SECTIONS = ("Start", "Expected in the log", "Verify", "Memory", "Limits")
HOPPER = "FLASH_ATTN_MLA_SPARSE"
#: Folder of each deployment: (tp, pcp, dcp).
DEPLOYMENTS = {
    "b200/glm-5.2-nvfp4-tp2-pcp2": (2, 2, 1),
    "b200/glm-5.2-nvfp4-tp1-pcp4": (1, 4, 1),
    "b200/glm-5.2-nvfp4-tp1-pcp4-dcp4": (1, 4, 4),
    "b200/glm-5.2-fp8-tp8-dcp8": (8, 1, 8),
    "b200/glm-5.2-fp8-tp8-dcp4": (8, 1, 4),
    "b200/deepseek-v3.2-tp8-dcp8": (8, 1, 8),
    "h200/glm-5.2-fp8-tp8-dcp8": (8, 1, 8),
}


def name_of(script):
    return str(script.parent.relative_to(EXAMPLES))


@pytest.fixture(params=LAUNCHES, ids=name_of)
def launch(request):
    return request.param


def needs_hopper(script):
    if script.is_relative_to(EXAMPLES / "h200") and HOPPER in RELEASE.left_to_stock:
        pytest.skip(f"vLLM {RELEASE.series}: {HOPPER} is left to stock")


@pytest.fixture
def commands(tmp_path):
    """A folder with a ``vllm`` and a ``vllm-dcp-mla`` that write down how they are called."""
    for name in ("vllm", "vllm-dcp-mla"):
        script = tmp_path / name
        script.write_text(
            f"#!{sys.executable}\nimport json, os, sys\n"
            f"with open({str(tmp_path / 'calls')!r}, 'a') as calls:\n"
            f"    calls.write(json.dumps([{name!r}, os.getpid(), *sys.argv[1:]]) + '\\n')\n"
            "sys.exit(int(os.environ.get('FAKE_STATUS', '0')) if sys.argv[1] != 'serve' else 0)\n"
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return tmp_path


def run(script, commands, *arguments, **environment):
    """The calls that a script makes, in order, and how it ended."""
    (commands / "calls").unlink(missing_ok=True)
    # Nothing of this shell overrides a script's values.
    kept = {"PATH": f"{commands}:{os.environ['PATH']}", "HOME": str(commands)}
    done = subprocess.Popen(
        [script, *arguments],
        env={**kept, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = done.communicate(timeout=60)
    noted = commands / "calls"
    calls = [json.loads(s) for s in noted.read_text().splitlines()] if noted.exists() else []
    return calls, done, out + err


def value(flags, name):
    return flags[flags.index(name) + 1] if name in flags else None


def test_every_deployment_has_its_folder():
    assert {name_of(script) for script in LAUNCHES} == set(DEPLOYMENTS)


def test_a_script_looks_and_then_becomes_the_server(launch, commands):
    calls, done, said = run(launch, commands)
    assert done.returncode == 0, said
    assert [call[0] for call in calls] == ["vllm-dcp-mla", "vllm-dcp-mla", "vllm"]
    assert [call[2] for call in calls] == ["plan", "doctor", "serve"]
    serve = calls[-1]
    assert serve[1] == done.pid, "vllm serve is not exec'd: signals would not reach it"
    tp, pcp, dcp = DEPLOYMENTS[name_of(launch)]
    assert value(serve, "--tensor-parallel-size") == str(tp)
    assert value(serve, "--prefill-context-parallel-size") == str(pcp)
    assert value(serve, "--decode-context-parallel-size") == str(dcp)
    if pcp > 1 and dcp > 1:
        assert value(serve, "--dcp-comm-backend") == "ag_rs"
    assert value(serve, "--host") == "127.0.0.1"


def test_what_is_asked_is_what_is_served(launch, commands):
    (plan, doctor, serve), _, _ = run(launch, commands)
    for asked, served in (
        ("--tp", "--tensor-parallel-size"),
        ("--kv-cache-dtype", "--kv-cache-dtype"),
        ("--max-num-batched-tokens", "--max-num-batched-tokens"),
    ):
        assert value(plan, asked) == value(doctor, asked) == value(serve, served)
    for asked, served in (
        ("--max-model-len", "--max-model-len"),
        ("--max-num-seqs", "--max-num-seqs"),
        ("--utilization", "--gpu-memory-utilization"),
    ):
        assert value(plan, asked) == value(serve, served)


def test_every_value_comes_from_the_environment(launch, commands):
    names = re.findall(r"^([A-Z_]+)=\$\{\1:-", launch.read_text(), re.MULTILINE)
    assert {"MODEL", "TP", "PCP", "DCP", "MAX_MODEL_LEN", "GPU_MEMORY_UTILIZATION"} <= set(names)
    changed = {name: str(7000 + number) for number, name in enumerate(names)}
    calls, done, said = run(launch, commands, "--api-key", "secret", **changed)
    assert done.returncode == 0, said
    serve = calls[-1]
    for name in set(names) - {"PLAN_MODEL"}:
        assert changed[name] in serve, name
    assert serve[-2:] == ["--api-key", "secret"]
    assert "--model" in calls[0]
    assert value(calls[0], "--model") == changed["PLAN_MODEL"]


def test_one_flag_a_line(launch):
    _, _, served = launch.read_text().partition("exec vllm serve")
    lines = [line.strip().removesuffix(" \\") for line in served.splitlines()[1:]]
    assert lines[-1] == '"$@"'
    for line in lines[:-1]:
        assert line.count(" --") == 0
        assert line.startswith(("--", "${drafter"))


def test_a_failed_look_stops_it(launch, commands):
    calls, done, said = run(launch, commands, FAKE_STATUS="1")
    assert done.returncode == 1
    assert [call[2] for call in calls] == ["plan"]
    assert "PREFLIGHT=0" in said
    calls, done, _ = run(launch, commands, FAKE_STATUS="1", PREFLIGHT="0")
    assert done.returncode == 0
    assert [call[2] for call in calls] == ["serve"]


@pytest.mark.parametrize("name", ["PREFLIGHT", "MTP"])
def test_a_value_that_means_nothing_stops_it(launch, commands, name):
    calls, done, said = run(launch, commands, **{name: "yes"})
    assert done.returncode == 1
    assert calls == []
    assert f"{name} is 'yes', it must be" in said


@pytest.mark.parametrize("mtp", [0, 3])
def test_the_plan_fits(launch, commands, capsys, mtp):
    needs_hopper(launch)
    gpu = launch.relative_to(EXAMPLES).parts[0]
    calls, _, _ = run(launch, commands, GPU=gpu, MTP=str(mtp))
    assert main([*calls[0][2:], "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["ok"]
    assert plan["kv"]["requests"] >= 1
    assert ("weights_drafter" in {line["key"] for line in plan["lines"]}) == (mtp > 0) or not mtp
    if "MTP=" in launch.read_text():
        served = value(calls[-1], "--speculative-config.num_speculative_tokens")
        assert served == (str(mtp) if mtp else None)


@pytest.mark.vllm
@pytest.mark.parametrize("mtp", [0, 3])
def test_stock_vllm_parses_the_flags(cpu_vllm, launch, commands, mtp):
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    calls, _, _ = run(launch, commands, MTP=str(mtp))
    serve = calls[-1]
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(serve[3:])
    tp, pcp, dcp = DEPLOYMENTS[name_of(launch)]
    assert parsed.tensor_parallel_size == tp
    assert parsed.prefill_context_parallel_size == pcp
    assert parsed.decode_context_parallel_size == dcp
    assert parsed.model_tag == serve[3]
    if mtp and "MTP=" in launch.read_text():
        assert parsed.speculative_config["num_speculative_tokens"] == mtp


@pytest.mark.vllm
def test_the_parsers_that_are_named_exist(cpu_vllm):
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    text = "".join(script.read_text() for script in LAUNCHES)
    for flag, manager in (
        ("tool-call-parser", ToolParserManager.get_tool_parser),
        ("reasoning-parser", ReasoningParserManager.get_reasoning_parser),
    ):
        for name in set(re.findall(rf"--{flag} (\S+)", text)):
            assert manager(name) is not None


def shellcheck():
    return shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.mark.skipif(shellcheck() is None, reason="needs shellcheck, of the dev group")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_scripts_pass_shellcheck(script):
    done = subprocess.run(
        [shellcheck(), "--external-sources", script.relative_to(ROOT)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_a_readme_stands_beside_each_script(launch):
    text = launch.with_name("README.md").read_text()
    assert re.findall(r"^## (.*)", text, re.MULTILINE) == list(SECTIONS)
    for row in ("Hardware", "Versions", "Status"):
        assert re.search(rf"^\| {row} \| \S", text, re.MULTILINE)
    assert f"vllm-dcp-mla {vllm_dcp_mla.__version__}" in text
    assert ("MTP=3" in text) == ("MTP=" in launch.read_text())
    served = re.search(r"SERVED_MODEL_NAME:-([\w.-]+)", launch.read_text())[1]
    assert f'"model": "{served}"' in text
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (launch.parent / target).exists()


@pytest.mark.parametrize(
    ("folder", "heads"),
    [("glm-5.2-fp8-tp8-dcp8", 64), ("glm-5.2-fp8-tp8-dcp4", 32), ("deepseek-v3.2-tp8-dcp8", 128)],
)
def test_the_workspace_line_is_the_codes(folder, heads):
    plan = plan_workspace(heads, 16384)
    text = (EXAMPLES / "b200" / folder / "README.md").read_text()
    assert (
        f"Attention workspace on cuda:0: {plan.total_bytes:,} bytes "
        f"({plan.total_bytes / 2**30:.3f} GiB), {plan.tokens_per_launch} tokens a launch at "
        f"{heads} heads."
    ) in text


def test_the_gather_line_is_the_codes():
    plan = plan_gather(
        limit_bytes=DEFAULT_GATHER_LIMIT_BYTES,
        row_bytes=576,
        dcp=4,
        interleave=1,
        max_model_len=1_048_576,
        max_num_seqs=256,
        max_num_tokens=4096,
        heads=64,
        latent_dim=512,
    )
    text = (EXAMPLES / "b200" / "glm-5.2-nvfp4-tp1-pcp4-dcp4" / "README.md").read_text()
    assert (
        f"Gather workspace on cuda:0: {plan.total_bytes:,} bytes "
        f"({plan.total_bytes / 2**30:.3f} GiB), contexts of {plan.rows_per_rank * 4} tokens in one "
        "range."
    ) in text


def test_the_image_installs_without_dependencies():
    text = (EXAMPLES / "docker" / "Dockerfile").read_text()
    assert text.count("FROM vllm/vllm-openai:v0.33.0") == 1
    assert "--no-deps" in text
    assert re.search(r'^ENTRYPOINT \["vllm", "serve"\]$', text, re.MULTILINE)
    for line in re.findall(r"^COPY (.*)", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists()
