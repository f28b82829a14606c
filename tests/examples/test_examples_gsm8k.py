"""The evaluation: its programs against a real OpenAI-compatible server on loopback."""

import importlib.util
import json
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "gsm8k"
for needed in ("fastapi", "uvicorn"):
    pytest.importorskip(needed)

#: GSM8K's format: its prompt, its answer after ####, lm-eval's two filters by their names.
TASK = """
task: sums
dataset_path: json
dataset_kwargs:
  data_files:
    train: {folder}/train.jsonl
    test: {folder}/test.jsonl
output_type: generate_until
training_split: train
fewshot_split: train
test_split: test
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
    regexes_to_ignore: ["(?s).*#### "]
generation_kwargs:
  until: ["Question:"]
  do_sample: false
filter_list:
  - name: strict-match
    filter:
      - function: regex
        regex_pattern: "#### (-?[0-9]+)"
      - function: take_first
  - name: flexible-extract
    filter:
      - function: regex
        group_select: -1
        regex_pattern: "(-?[0-9]+)"
      - function: take_first
"""
ITEMS = 24


def load(name):
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location(f"gsm8k_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(FOLDER))


compare, retrieval = load("compare"), load("retrieval")


def app(wrong):
    """Continues prompts of sums and of codes; ``wrong(number)`` says which sums it gets wrong."""
    from fastapi import FastAPI, HTTPException, Request

    server = FastAPI()

    def answer(prompt):
        code = re.search(r"The code of (\S+) is$", prompt)
        if code:
            found = re.search(rf"the code of {re.escape(code[1])} is (\d+)\.", prompt)
            return f" {found[1]}." if found else " unknown."
        first, second = map(int, re.findall(r"What is (\d+) plus (\d+)\?", prompt)[-1])
        return f" It is the sum.\n#### {first + second + (1 if wrong(first) else 0)}"

    @server.get("/v1/models")
    def models():
        return {"object": "list", "data": [{"id": "sums", "object": "model"}]}

    @server.post("/v1/completions")
    async def completions(request: Request):
        body = await request.json()
        if body["model"] != "sums":
            raise HTTPException(404, "The model does not exist.")
        prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
        choices = [
            {"index": i, "text": answer(p), "finish_reason": "stop"} for i, p in enumerate(prompts)
        ]
        return {"object": "text_completion", "model": "sums", "choices": choices}

    return server


@pytest.fixture
def serve():
    """Starts servers on loopback; each ends with the test."""
    import uvicorn

    running = []

    def start(wrong=lambda number: False):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        config = uvicorn.Config(app(wrong), host="127.0.0.1", port=port, log_level="error")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        running.append((server, thread))
        for _ in range(200):
            if server.started:
                return f"http://127.0.0.1:{port}/v1"
            time.sleep(0.05)
        raise AssertionError("the server did not start")

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(10)


@pytest.fixture
def task(tmp_path):
    folder = tmp_path / "task"
    folder.mkdir()
    for name, start in (("train", 1000), ("test", 0)):
        rows = [
            {"question": f"What is {n} plus {n + 7}?", "answer": f"A sum.\n#### {2 * n + 7}"}
            for n in range(start, start + ITEMS)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "sums.yaml").write_text(TASK.format(folder=folder))
    return folder


def evaluate(tmp_path, url, task, label, *more):
    out = tmp_path / "results" / f"{label}.json"
    done = subprocess.run(
        [
            *(sys.executable, str(FOLDER / "evaluate.py"), "--base-url", url, "--model", "sums"),
            *("--task", "sums", "--include-path", str(task), "--label", label, "--out", str(out)),
            *("--fewshot", "2", "--concurrency", "4", *more),
        ],
        # Nothing may come from a hub.
        env={
            **{"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf")},
            **{"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done, out


@pytest.mark.slow
def test_two_servers_are_compared_question_by_question(tmp_path, serve, task):
    pytest.importorskip("lm_eval", reason="needs lm-eval, of the dev group")
    files = {}
    for label, url in (("dcp1", serve()), ("dcp8", serve(lambda n: n in (3, 5, 8)))):
        done, files[label] = evaluate(tmp_path, url, task, label)
        assert done.returncode == 0, done.stderr[-2000:]
    one, eight = (json.loads(file.read_text()) for file in files.values())
    assert one["accuracy"] == {"strict-match": 1.0, "flexible-extract": 1.0}
    assert eight["accuracy"]["strict-match"] == (ITEMS - 3) / ITEMS
    assert one["questions"] == ITEMS
    assert one["versions"]["vllm-dcp-mla"]
    assert one["versions"]["lm-eval"]
    (row,) = compare.compare(
        {"items": {"strict-match": one["items"]["strict-match"]}},
        {"items": {"strict-match": eight["items"]["strict-match"]}},
        tolerance=0.01,
    )
    assert (row["worse"], row["better"], row["ok"]) == (3, 0, False)


def test_retrieval_asks_beyond_the_top_k(tmp_path, serve, capsys):
    out = tmp_path / "retrieval.json"
    arguments = ["--base-url", serve(), "--model", "sums", "--label", "dcp1", "--out", str(out)]
    retrieval.main([*arguments, "--items", "4", "--lines", "8", "512"])
    report = json.loads(out.read_text())
    assert report["accuracy"] == {"8 lines": 1.0, "512 lines": 1.0}
    assert set(report["items"]["512 lines"]) == {"0", "1", "2", "3"}
    assert "1.0000 of 4 prompts (512 lines)" in capsys.readouterr().out
    compare.main([str(out), str(out), "--tolerance", "0.9"])


def test_prompts_are_long_and_sought_lines_lie_everywhere():
    prompts = [retrieval.make(1024, seed) for seed in range(32)]
    places = [p.index(f"is {value}.") / len(p) for p, value in prompts]
    assert min(places) < 0.2
    assert max(places) > 0.8
    # A token has about four letters: far more than 2,048.
    assert all(len(p) > 4 * 4 * 2048 for p, _ in prompts)
    assert retrieval.make(64, 1) == retrieval.make(64, 1) != retrieval.make(64, 2)


@pytest.mark.parametrize("model", ["another"])
def test_a_server_that_refuses_is_told(tmp_path, serve, model):
    arguments = ["--base-url", serve(), "--model", model, "--label", "x"]
    with pytest.raises(SystemExit, match="does not exist"):
        retrieval.main([*arguments, "--out", str(tmp_path / "x.json"), "--items", "1"])


def test_no_server_is_told(tmp_path):
    arguments = ["--base-url", "http://127.0.0.1:9/v1", "--model", "m", "--label", "x"]
    with pytest.raises(SystemExit, match="did not complete"):
        retrieval.main([*arguments, "--out", str(tmp_path / "x.json"), "--items", "1"])


def results(path, right, count=1319, lost=(), won=()):
    """A file in which items below ``right`` are right but for some."""
    items = {str(i): float(i < right) for i in range(count)}
    items |= {str(i): 0.0 for i in lost} | {str(i): 1.0 for i in won}
    path.write_text(json.dumps({"label": path.stem, "versions": {}, "items": {"strict": items}}))
    return str(path)


@pytest.fixture
def base(tmp_path):
    return results(tmp_path / "dcp1.json", 1240)


def verdict(tmp_path, base, *arguments, **after):
    other = results(tmp_path / "dcp8.json", 1240, **after)
    out = tmp_path / "verdict.json"
    status = 0
    try:
        compare.main([base, other, "--out", str(out), *arguments])
    except SystemExit as stop:
        status = stop.code
    return status, json.loads(out.read_text())["rows"][0]


def test_the_same_answers_pass(tmp_path, base):
    status, row = verdict(tmp_path, base, "--tolerance", "0.01")
    assert (status, row["difference"]) == (0, 0)
    assert -0.01 < row["low"] < 0 < row["high"]


def test_as_many_lost_as_won_pass(tmp_path, base):
    changed = {"lost": range(0, 8), "won": range(1300, 1308)}
    status, row = verdict(tmp_path, base, "--tolerance", "0.01", **changed)
    assert (status, row["worse"], row["better"]) == (0, 8, 8)


def test_a_loss_that_the_usual_gate_passes_fails(tmp_path, base):
    # 0.94 -> 0.85: above 0.90 - 0.08.
    status, row = verdict(tmp_path, base, "--tolerance", "0.01", lost=range(120))
    assert status == 1
    assert row["after"] > 0.82
    assert row["high"] < -0.05


def test_the_interval_covers_the_difference(tmp_path, base):
    status, row = verdict(
        tmp_path, base, "--tolerance", "0.05", lost=range(30), won=range(1300, 1305)
    )
    assert row["difference"] == pytest.approx(-25 / 1319)
    assert row["low"] < row["difference"] < row["high"]
    # The same as the normal approximation of paired differences.
    variance = (35 - 25**2 / 1319) / 1319**2
    assert row["low"] == pytest.approx(row["difference"] - 1.96 * variance**0.5, abs=0.0015)
    assert status == 0


def test_a_floor_is_one_of_its_own(tmp_path, base):
    assert verdict(tmp_path, base, "--tolerance", "0.05", "--floor", "0.95")[0] == 1
    assert verdict(tmp_path, base, "--tolerance", "0.05", "--floor", "0.90")[0] == 0


@pytest.mark.parametrize("content", ["", "[]", "{}", "3"])
def test_a_file_that_is_no_result_is_named(tmp_path, base, content):
    other = tmp_path / "other.json"
    other.write_text(content)
    with pytest.raises(SystemExit, match=r"other\.json"):
        compare.main([base, str(other), "--tolerance", "0.01"])


def test_other_questions_are_refused(tmp_path, base):
    other = results(tmp_path / "short.json", 10, count=20)
    with pytest.raises(SystemExit, match="1319 and 20"):
        compare.main([base, other, "--tolerance", "0.01"])


def test_there_is_no_default_tolerance(base):
    with pytest.raises(SystemExit):
        compare.main([base, base])
