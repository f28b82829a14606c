#!/usr/bin/env python3
"""Two result files, item by item: is the second as accurate as the first?

    ./compare.py results/dcp1.json results/dcp8.json --tolerance 0.01 --floor 0.90

The same questions are paired: what both get right or wrong says nothing, and a few hundred
questions see a difference that two independent runs would hide in their noise. It passes when the
95 % interval of the difference lies above -TOLERANCE. The tolerance has no default: a threshold of
0.90 with 0.08, as vLLM's own gate has, passes at 0.82.
"""

import argparse
import json
import math
import random
import sys
from pathlib import Path
from typing import Any

_ROUNDS = 10_000
_TAIL = 0.025


def read(path: Path) -> dict[str, Any]:
    """A result file, or the end of the program with what is wrong."""
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"{path} cannot be read ({error}); give a file of evaluate.py or retrieval.py.")
    if not isinstance(report, dict) or not isinstance(report.get("items"), dict):
        sys.exit(f"{path} holds no items; give a file of evaluate.py or retrieval.py.")
    return report


def interval(differences: list[float], seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of the mean: bootstrap over items, exact where none differs.

    Where no item differs the rule of three gives how large an unseen difference may be.
    """
    count = len(differences)
    if not any(differences):
        return -3 / count, 3 / count
    chance = random.Random(seed)
    # Items are -1, 0 or 1: drawing their counts is the same as drawing items, and quick.
    means = []
    worse, better = (sum(d == sign for d in differences) / count for sign in (-1, 1))
    for _ in range(_ROUNDS):
        lost = _binomial(chance, count, worse)
        won = _binomial(chance, count - lost, better / (1 - worse) if worse < 1 else 0.0)
        means.append((won - lost) / count)
    means.sort()
    return means[int(_TAIL * _ROUNDS)], means[int((1 - _TAIL) * _ROUNDS) - 1]


def _binomial(chance: random.Random, count: int, share: float) -> int:
    if count * min(share, 1 - share) > 25:
        drawn = round(chance.gauss(count * share, math.sqrt(count * share * (1 - share))))
        return min(max(drawn, 0), count)
    return sum(chance.random() < share for _ in range(count))


def compare(
    before: dict[str, Any], after: dict[str, Any], tolerance: float
) -> list[dict[str, Any]]:
    """One verdict a filter (or a length) that both files have."""
    rows = []
    for name in before["items"]:
        first, second = before["items"][name], after["items"].get(name, {})
        if not first and not second:
            continue
        if set(first) != set(second):
            sys.exit(
                f"The files hold other items for {name}: {len(first)} and {len(second)}; run both "
                "with the same task and --limit."
            )
        differences = [second[item] - first[item] for item in first]
        low, high = interval(differences)
        rows.append(
            {
                "name": name,
                "questions": len(first),
                "before": sum(first.values()) / len(first),
                "after": sum(second.values()) / len(second),
                "difference": sum(differences) / len(differences),
                "low": low,
                "high": high,
                "worse": differences.count(-1.0),
                "better": differences.count(1.0),
                "ok": low >= -tolerance,
            }
        )
    if not rows:
        sys.exit("The files have no filter in common; compare files of the same task.")
    return rows


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="results without DCP")
    parser.add_argument("after", type=Path, help="results with DCP")
    parser.add_argument("--tolerance", type=float, required=True, help="largest loss, such as 0.01")
    parser.add_argument("--floor", type=float, help="least accuracy of the second, such as 0.90")
    parser.add_argument("--filter", help="judge by one filter, such as flexible-extract")
    parser.add_argument("--out", type=Path, help="write the verdict as JSON")
    options = parser.parse_args(arguments)
    if not 0 <= options.tolerance < 1:
        parser.error(f"--tolerance is {options.tolerance}, but it is a share, from 0 to below 1")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    before, after = read(options.before), read(options.after)
    rows = compare(before, after, options.tolerance)
    if options.filter is not None:
        rows = [row for row in rows if row["name"] == options.filter]
        if not rows:
            sys.exit(f"--filter is {options.filter!r}; known: {', '.join(before['items'])}.")
    for row in rows:
        if options.floor is not None:
            row["ok"] = row["ok"] and row["after"] >= options.floor
        verdict = "ok" if row["ok"] else "FAILS"
        print(
            f"{row['name']}: {row['before']:.4f} -> {row['after']:.4f} of {row['questions']}, "
            f"difference {row['difference']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}], "
            f"{row['worse']} lost, {row['better']} won: {verdict}"
        )
    ok = all(row["ok"] for row in rows)
    if options.out is not None:
        named = {"before": before.get("label"), "after": after.get("label")}
        kept = {"tolerance": options.tolerance, "floor": options.floor}
        seen = {"before": before.get("versions"), "after": after.get("versions")}
        verdict = {"ok": ok, **kept, "labels": named, "versions": seen, "rows": rows}
        options.out.write_text(json.dumps(verdict, indent=1) + "\n")
    if not ok:
        sys.exit(1)


if __name__ == "__main__":
    main()
