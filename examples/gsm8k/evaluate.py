#!/usr/bin/env python3
"""GSM8K, or a task of its format, against a server, through lm-eval; one JSON file with every item.

    pip install '.[eval]'
    ./evaluate.py --label dcp1 --model glm-5.2-fp8 --out results/dcp1.json
    ./evaluate.py --label dcp8 --model glm-5.2-fp8 --out results/dcp8.json
    ./compare.py results/dcp1.json results/dcp8.json --tolerance 0.01

lm-eval downloads the data set's 1,319 questions the first time.
"""

import argparse
import json
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("vllm-dcp-mla", "vllm", "flashinfer-python", "torch", "lm-eval")
#: lm-eval's two ways to find the number in an answer.
FILTERS = ("strict-match", "flexible-extract")


def versions() -> dict[str, str | None]:
    """Of the machine that asks; run it where the server runs to have the server's."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def ask(options: argparse.Namespace) -> dict[str, Any]:
    """lm-eval's results, samples included."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        sys.exit(f"lm-eval is not installed ({error}); pip install '.[eval]'.")
    results = simple_evaluate(
        model="local-completions",
        model_args={
            "model": options.model,
            "base_url": f"{options.base_url.rstrip('/')}/completions",
            "tokenized_requests": False,
            "tokenizer_backend": None,
            "num_concurrent": options.concurrency,
            "max_retries": 3,
            "timeout": options.timeout,
        },
        tasks=[options.task],
        num_fewshot=options.fewshot,
        limit=options.limit,
        log_samples=True,
        bootstrap_iters=0,
        task_manager=TaskManager(include_path=options.include_path),
    )
    if results is None or not results["samples"].get(options.task):
        sys.exit(f"lm-eval returned no sample of {options.task}; see its messages above.")
    return results


def items(samples: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Right (1) or wrong (0) by filter, and by the item's number in the data set."""
    scored: dict[str, dict[str, float]] = {name: {} for name in FILTERS}
    for sample in samples:
        if sample["filter"] in scored:
            scored[sample["filter"]][str(sample["doc_id"])] = float(sample["exact_match"])
    return scored


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", required=True, help="the server's --served-model-name")
    parser.add_argument("--label", required=True, help="what ran, such as dcp8")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--task", default="gsm8k")
    parser.add_argument("--include-path", help="a folder with a task of your own")
    parser.add_argument("--fewshot", type=int, default=5)
    parser.add_argument("--limit", type=int, help="the first N items only")
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--timeout", type=int, default=600, help="seconds of one request")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    started = time.time()
    results = ask(options)
    scored = items(results["samples"][options.task])
    accuracy = {name: sum(i.values()) / len(i) for name, i in scored.items() if i}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "label": options.label,
        "task": options.task,
        "model": options.model,
        "fewshot": options.fewshot,
        "questions": max(map(len, scored.values())),
        "accuracy": accuracy,
        "versions": versions(),
        "seconds": round(time.time() - started, 1),
        "items": scored,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    for name, value in accuracy.items():
        print(f"{options.label}: {value:.4f} of {len(scored[name])} questions ({name})")


if __name__ == "__main__":
    main()
