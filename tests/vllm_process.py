"""A process that has imported vLLM as on a B200, without plugins; each case is a fork of it.

vLLM's own processes start fresh, and importing it takes many seconds. A fork has what a fresh
process has after the import, and leaves nothing behind.
"""

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

PRELUDE = """
import json, os, logging
from vllm_dcp_mla.simulate import driver
driver.ensure_loaded()
os.environ["DCP_MLA_SIMULATED_GPU"] = "b200"
import vllm.platforms
from vllm_dcp_mla.simulate.platform import SimulatedCudaPlatform
vllm.platforms._current_platform = SimulatedCudaPlatform()
from vllm.v1.attention.backends.registry import AttentionBackendEnum as E, register_backend
def paths(): return {m.name: m.get_path() for m in E if m.value or m.is_overridden()}
before = paths()
from vllm.plugins import load_general_plugins
# Now: some series set up logging while they are imported, which drops handlers.
records = []
class Keep(logging.Handler):
    def emit(self, record): records.append((record.levelname, record.getMessage()))
logging.getLogger("vllm.dcp_mla").addHandler(Keep())
logging.getLogger("vllm.dcp_mla").setLevel(logging.INFO)
def report(**more):
    print("REPORT " + json.dumps({"before": before, "after": paths(), "log": records, **more}))
"""
FORKS = """
import signal, sys, traceback
print("READY", flush=True)
for line in sys.stdin:
    case = json.loads(line)
    child = os.fork()
    if child == 0:
        said = os.open(case["said"], os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1), os.dup2(said, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.alarm(300)
        os.environ.update(case["env"])
        status = 1
        try:
            exec(case["body"], globals())
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)
    os.waitpid(child, 0)
    print("DONE", flush=True)
"""


class VllmProcess:
    """The process, a context manager; ``more`` is done before the first fork."""

    def __init__(self, more=""):
        self._program = PRELUDE + more + FORKS

    def __enter__(self):
        # Tests on vLLM's CPU platform leave their variables in this process.
        inherited = {n: v for n, v in os.environ.items() if not n.startswith(("VLLM_", "TRITON_"))}
        self._folder = tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", self._program],
            env={**inherited, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._wait("READY")
        return self

    def __exit__(self, *error):
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()

    def _wait(self, word):
        for line in self._process.stdout:
            if line.strip() == word:
                return
        raise AssertionError("the process that imported vLLM is gone")

    def run(self, body, **env):
        """What ``body`` reports, run in a fork with these variables."""
        said = Path(self._folder.name, "said")
        said.write_text("")
        case = {"body": textwrap.dedent(body), "env": env, "said": str(said)}
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        self._wait("DONE")
        lines = said.read_text().splitlines()
        reports = [line for line in lines if line.startswith("REPORT ")]
        assert reports, "\n".join(lines[-60:]) or "it ended without a word, or after 300 s"
        return json.loads(reports[-1].removeprefix("REPORT "))
