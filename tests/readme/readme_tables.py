"""The README's tables that follow from the code. Run as a program, it writes them into the README.

A table stands between ``<!-- NAME: ... -->`` and ``<!-- /NAME -->``.
"""

import re
import sys
from itertools import groupby
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support import LIBRARIES, SUITES, load
from vllm_dcp_mla import gathered_heads, plan_workspace, stock_workspace_bytes
from vllm_dcp_mla.capability import row, serving
from vllm_dcp_mla.compat.libraries import ASSUMED
from vllm_dcp_mla.compat.releases import release_of
from vllm_dcp_mla.compat.upstream import STATUS
from vllm_dcp_mla.planner.request import RawRequest, read_request
from vllm_dcp_mla.plugin import ALIAS
from vllm_dcp_mla.settings import ENV_ONLY, Settings, env_name
from vllm_dcp_mla.simulate.gpus import GPUS

README = Path(__file__).parents[2] / "README.md"
MODELS = {"GLM-5.2": "glm-5.2", "DeepSeek-V3.2": "deepseek-v3.2"}
CACHES = ("bfloat16", "fp8_e4m3", "fp8_ds_mla", "nvfp4_ds_mla")
TOPOLOGIES = {
    "TP8 DCP8": (8, 1, 8),
    "TP8 DCP2": (8, 1, 2),
    "TP2 DCP2": (2, 1, 2),
    "PCP4 DCP4": (1, 4, 4),
}
#: Tokens of a step and models (heads a rank) of the workspace table, at TP8 DCP8.
STEPS = (8192, 32768)
HEADS_PER_RANK = {"GLM-5.2": 8, "DeepSeek-V3.2": 16}


def table(head, rows, align=""):
    dashes = [{"r": "---:"}.get(a, "---") for a in align.ljust(len(head))]
    return "\n".join(f"| {' | '.join(map(str, r))} |" for r in (head, dashes, *rows))


def capability_cell(gpu, cache, sizes):
    marks = {}
    for name, model in MODELS.items():
        raw = RawRequest(model, gpu.name, *map(str, sizes), cache, "8192", None)
        backend = serving(read_request(raw).deployment(gpu, ASSUMED, kernel="auto"))
        ours = backend is not None and row(backend).ours
        marks[name] = "✅" if ours else "⚪" if backend else "❌"
    if len(set(marks.values())) == 1:
        return next(iter(marks.values()))
    return ", ".join(f"{mark} {name}" for name, mark in marks.items())


def capability():
    rows = []
    for gpu in GPUS.values():
        for cache in CACHES:
            cells = [capability_cell(gpu, cache, sizes) for sizes in TOPOLOGIES.values()]
            rows.append((gpu.name.upper(), f"`{cache}`", *cells))
    by_gpu = {name: [r[1:] for r in same] for name, same in groupby(rows, lambda r: r[0])}
    merged = []
    for name, lines in by_gpu.items():
        if merged and merged[-1][1] == lines:
            merged[-1] = (f"{merged[-1][0]}, {name}", lines)
        else:
            merged.append((name, lines))
    return table(
        ("GPU", "KV cache", *TOPOLOGIES),
        [(names, *line) for names, lines in merged for line in lines],
    )


def settings():
    rows = []
    for name, field in Settings.model_fields.items():
        default = {True: "on", False: "off"}.get(field.default, field.default)
        if type(field.default) is int:
            default = f"{field.default:,}"
        meaning = field.description.replace(" (environment only)", "")
        key = "none" if name in ENV_ONLY else f"`{name}`"
        rows.append((f"`{env_name(name)}`", key, default, meaning))
    return table(("Variable", "Key of `dcp_mla`", "Default", "Meaning"), rows)


def workspace():
    rows = []
    for model, heads in HEADS_PER_RANK.items():
        for tokens in STEPS:
            plan = plan_workspace(gathered_heads(heads, 8, 1, 8), tokens)
            stock = stock_workspace_bytes(heads, 8, tokens)
            sizes = (f"{size:,}" for size in (stock, plan.total_bytes))
            rows.append((model, f"{tokens:,}", *sizes, plan.num_launches(tokens)))
    head = ("Model", "Tokens of a step", "Stock vLLM 0.33.0", "vllm-dcp-mla", "Launches")
    return table(head, rows, " rrrr")


def support():
    """What the last run of tests/run.sh over every release showed."""
    rows = []
    for version, outcome in load().items():
        libraries = ", ".join(outcome[name] for name in LIBRARIES)
        marks = ({True: "✅", False: "❌", None: "not run"}[outcome[suite]] for suite in SUITES)
        alias = ALIAS if release_of(version).takes_new_names else "CUSTOM"
        lacks = "; ".join(outcome["lacks"]) or "nothing"
        rows.append((version, libraries, *marks, f"`{alias}`", lacks))
    head = ("vLLM", "torch, Triton, FlashInfer", *SUITES, "Our name", "Stock lacks")
    return table(head, rows)


def upstream():
    rows = [
        (f"`{s.where}`", s.what, s.upstream, f"0.{s.since}" if s.since else "none") for s in STATUS
    ]
    return table(
        ("Where", "What is done here", "What vLLM does, or would have to do", "Since"), rows
    )


def updated(text):
    """The README's text with every table as the code has it."""
    for make in (capability, settings, workspace, support, upstream):
        made = make()
        mark = re.compile(rf"(<!-- {make.__name__}: .*?-->\n).*?(<!-- /{make.__name__} -->)", re.S)
        text, count = mark.subn(rf"\g<1>{made}\n\g<2>", text)
        if count != 1:
            raise ValueError(f"the README has {count} places for the table {make.__name__}")
    return text


if __name__ == "__main__":
    README.write_text(updated(README.read_text()))
