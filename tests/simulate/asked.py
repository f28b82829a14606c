"""Stock vLLM's selection for GPUs that are not there, several questions to one process."""

import json
import os
import subprocess
import sys

PROGRAM = """
import json, sys
from vllm_dcp_mla.models import load_config
from vllm_dcp_mla.simulate import selection
for question in json.load(sys.stdin):
    config = load_config(question.pop("model"))
    answer = selection._answer(selection.Question(config, **question))
    from vllm.v1.attention import selector
    selector._cached_get_attn_backend.cache_clear()
    print("ANSWER " + json.dumps(answer), flush=True)
"""


def ask(questions, **env):
    """Answers to ``simulate.selection``'s questions, whose model is a name; one GPU for all."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        input=json.dumps(questions),
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "VLLM_LOGGING_LEVEL": "ERROR",
            **env,
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    answers = [
        json.loads(line.removeprefix("ANSWER "))
        for line in done.stdout.splitlines()
        if line.startswith("ANSWER ")
    ]
    assert len(answers) == len(questions), done.stderr[-3000:]
    return answers
