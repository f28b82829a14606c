#!/usr/bin/env python3
"""Long-context retrieval against a server: GSM8K's prompts never exceed the indexer's top-k.

Each prompt holds numbered lines of a key and a value, and asks for the value of one of them. Most
are longer than index_topk (2,048 tokens), where the indexer has to choose. The file is one that
compare.py reads, with one filter a length.

    ./retrieval.py --label dcp8 --model glm-5.2-fp8 --out results/dcp8-retrieval.json
"""

import argparse
import json
import random
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from evaluate import versions

#: Lines of a prompt; one is about 20 tokens. The first is below index_topk, the others above.
LINES = (64, 256, 1024, 4096)
_WORDS = (
    "amber",
    "basil",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "heron",
    "indigo",
    "jasper",
)


def make(lines: int, seed: int) -> tuple[str, str]:
    """A prompt of random lines, and the value that it asks for."""
    chance = random.Random(f"{lines}-{seed}")
    keys = [f"{chance.choice(_WORDS)}-{number}" for number in chance.sample(range(10**5), lines)]
    values = [str(chance.randrange(10**6, 10**7)) for _ in keys]
    # Every part of the context is asked for: the sought line moves with the seed.
    sought = (seed * 7919 + chance.randrange(lines)) % lines
    text = "\n".join(
        f"Line {number}: the code of {key} is {value}."
        for number, (key, value) in enumerate(zip(keys, values, strict=True), 1)
    )
    question = (
        f"Question: What is the code of {keys[sought]}?\nAnswer: The code of {keys[sought]} is"
    )
    return f"Remember these lines.\n{text}\n\n{question}", values[sought]


def complete(options: argparse.Namespace, prompt: str) -> str:
    """The server's continuation.

    Raises:
        OSError: no answer, or one that is an error.
    """
    body = {"model": options.model, "prompt": prompt, "max_tokens": 12, "temperature": 0}
    request = urllib.request.Request(
        f"{options.base_url.rstrip('/')}/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=options.timeout) as answer:
        return json.load(answer)["choices"][0]["text"]


def score(options: argparse.Namespace, lines: int) -> dict[str, float]:
    """Right (1) or wrong (0) by item."""

    def one(seed: int) -> float:
        prompt, value = make(lines, seed)
        return float(value in complete(options, prompt))

    with ThreadPoolExecutor(options.concurrency) as pool:
        return {str(seed): right for seed, right in enumerate(pool.map(one, range(options.items)))}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", required=True, help="the server's --served-model-name")
    parser.add_argument("--label", required=True, help="what ran, such as dcp8")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--lines", type=int, nargs="+", default=LINES)
    parser.add_argument("--items", type=int, default=64, help="prompts of each length")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--timeout", type=int, default=600, help="seconds of one request")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    started = time.time()
    scored: dict[str, dict[str, float]] = {}
    for lines in options.lines:
        try:
            scored[f"{lines} lines"] = score(options, lines)
        except (OSError, ValueError, LookupError) as error:
            detail = error.read().decode(errors="replace") if _is_answer(error) else error
            sys.exit(f"{options.base_url} did not complete a prompt of {lines} lines: {detail}")
    accuracy: dict[str, Any] = {name: sum(i.values()) / len(i) for name, i in scored.items()}
    report = {
        "label": options.label,
        "task": "retrieval",
        "model": options.model,
        "questions": options.items,
        "accuracy": accuracy,
        "versions": versions(),
        "seconds": round(time.time() - started, 1),
        "items": scored,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    for name, value in accuracy.items():
        print(f"{options.label}: {value:.4f} of {options.items} prompts ({name})")


def _is_answer(error: Exception) -> bool:
    return isinstance(error, urllib.error.HTTPError)


if __name__ == "__main__":
    main()
