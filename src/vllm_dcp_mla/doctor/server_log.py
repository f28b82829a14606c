"""Known failures in a server's log, each with its fix.

A text is searched for as vLLM, FlashInfer or this package writes it; a test looks each up in their
sources.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .report import Check, Report, Status

_LONGEST_LINE = 20_000
_EXPECTED = "none in the log"
#: How Python, and vLLM's log, begin what ends a process.
_ERROR = re.compile(r"Traceback \(most recent call last\)|\bERROR\b|\b\w+Error: |core dumped")
_HARMLESS = re.compile(r"\b(?:DEBUG|INFO|WARNING)\b")


class LogError(ValueError):
    """A log that cannot be read; the message names it."""


@dataclass(frozen=True, slots=True)
class Symptom:
    """One known failure.

    Attributes:
        name: what it is.
        text: what the line holds, word for word; a test finds it in the source that writes it.
        fix: what to do.
        status: ``warn`` where the server goes on.
        details: what of the line is told, and must be in it; the rest of the line if empty.
    """

    name: str
    text: str
    fix: str
    status: Status = "fail"
    details: str = ""


_PLAN = "vllm-dcp-mla plan with the server's flags says what fits"

SYMPTOMS = (
    Symptom(
        "workspace overflow",
        "Buffer overflow when allocating memory for ",
        "serve DCP with this package on, which splits launches to fit (the log must hold its line "
        "'serves sparse MLA'), and unset VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE; without it, set "
        "that variable to the size of stock's column of vllm-dcp-mla plan",
        details=r"\S+ with size \d+ .*?but only \d+ bytes",
    ),
    Symptom(
        "negative KV budget",
        "No available memory for the cache blocks",
        f"{_PLAN}: lower --max-num-batched-tokens or --max-model-len, or raise "
        "--gpu-memory-utilization up to its largest safe one",
    ),
    Symptom(
        "KV cache below one request",
        "To serve at least one request with the model's max seq len",
        f"{_PLAN}: lower --max-model-len, raise --decode-context-parallel-size, or raise "
        "--gpu-memory-utilization up to its largest safe one",
        details=r"max seq len \(\d+\), \([\d.]+ GiB KV cache is needed.*?\([\d.-]+ GiB\)",
    ),
    Symptom(
        "autotuning out of memory",
        "[Autotuner]: OOM detected, falling back to default tactic",
        f"kernels are slower than they could be; {_PLAN}: lower --gpu-memory-utilization to its "
        "largest safe one, or lower --max-num-batched-tokens",
        "warn",
    ),
    Symptom(
        "late JIT compilation",
        " during inference: ",
        "one rank that compiles while others wait in a collective stalls all of them; serve with "
        "this package on and without --enforce-eager, which turns vLLM's warm-up off, and report "
        "the kernel's name to the project that owns it",
        "warn",
        details=r"\S+ [\w ]*(?:compil|autotun)\w*[\w ]* during inference: [\w.<>]+",
    ),
    Symptom(
        "refused by every backend",
        "No valid attention backend found for",
        "vllm-dcp-mla doctor with the server's flags names a combination that works",
        details=r"\w*SPARSE\w*: \[[^\]]*\]",
    ),
    Symptom(
        "refused by the backend named",
        " is not valid for this configuration. Reason: ",
        "leave --attention-backend out, or take the flags that the reason ends with",
        details=r"Selected backend .*? Reason: .*",
    ),
    Symptom(
        "refused in a constructor",
        "DCP for FlashMLA sparse ",
        "this is stock's class without this package's check: see that the plugin is on, then "
        "vllm-dcp-mla doctor with the server's flags names a combination that works",
    ),
    Symptom(
        "a class without LSE under DCP",
        "implementations to return the softmax LSE during decode, ",
        "leave --attention-backend out, or name DCP_MLA_SPARSE",
    ),
    Symptom(
        "a workspace that was locked too small",
        "Workspace is locked but allocation from ",
        "a step was larger than those at start-up; lower --max-num-batched-tokens, and report it "
        "to vLLM",
    ),
    Symptom(
        "a rank that did not answer",
        "RPC call to ",
        "look for a late JIT compilation or an error of one rank before it; with DCP all ranks "
        "need the same environment and plugins",
        details=r"RPC call to \w+ timed out",
    ),
    Symptom(
        "out of GPU memory",
        "CUDA out of memory. Tried to allocate ",
        f"{_PLAN}, also what is needed beside the requested share: lower --gpu-memory-utilization "
        "where it happened after the KV cache was made",
        details=r"Tried to allocate [\d.]+ \w+(?:\..*?of which [\d.]+ \w+ is free)?",
    ),
    Symptom(
        "FlashInfer's two packages differ",
        "flashinfer-cubin version (",
        "install flashinfer-cubin and flashinfer-python of the version that vLLM pins",
    ),
    Symptom(
        "this package is off",
        "vllm-dcp-mla is off: ",
        "the line says why",
        "warn",
        details=r"vllm-dcp-mla is off: .*",
    ),
)


@dataclass(slots=True)
class _Found:
    count: int
    line: int
    said: str


def read_log(path: str) -> Report:
    """Looks for every known failure in a file.

    Raises:
        LogError: the file cannot be read.
    """
    try:
        with Path(path).open(errors="replace") as lines:
            return examine_log(lines)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LogError(
            f"--log is {path!r}, which cannot be read ({reason}); give a server's log."
        ) from None


def examine_log(lines: Iterable[str]) -> Report:
    """Looks for every known failure in lines."""
    found: dict[str, _Found] = {}
    total, is_vllms, unknown = 0, False, None
    for number, line in enumerate(lines, 1):
        total = number
        line = line[:_LONGEST_LINE].rstrip("\n")
        is_vllms = is_vllms or "vllm" in line.lower()
        if unknown is None and _ERROR.search(line) and not _HARMLESS.search(line):
            unknown = _Found(1, number, line.strip()[:200])
        for symptom in SYMPTOMS:
            if symptom.text not in line:
                continue
            said = _said(symptom, line)
            if said is None:
                continue
            if symptom.name in found:
                found[symptom.name].count += 1
            else:
                found[symptom.name] = _Found(1, number, said)
    checks = [_check(symptom, found[symptom.name]) for symptom in SYMPTOMS if symptom.name in found]
    if not total:
        checks = [Check("log", "fail", "it is empty", "lines", "give the log of a server")]
    elif not checks:
        checks = [_none_known(total, is_vllms, unknown)]
    return Report(checks)


def _none_known(total: int, is_vllms: bool, unknown: _Found | None) -> Check:
    said = f"no known failure in {total:,} lines"
    if unknown is not None:
        said += f", but line {unknown.line} says: {unknown.said}"
        return Check("log", "warn", said, _EXPECTED, "read on from that line; no fix is known here")
    if not is_vllms:
        said += ", none of which names vLLM"
        return Check("log", "warn", said, _EXPECTED, "give a vLLM server's log, as text")
    return Check("log", "pass", said, _EXPECTED)


def _said(symptom: Symptom, line: str) -> str | None:
    """What to tell of a line; None where its details are another message's."""
    if not symptom.details:
        return line[line.index(symptom.text) :][:200]
    matches = [match[0] for match in re.finditer(symptom.details, line)]
    return "; ".join(matches[:4])[:400] or None


def _check(symptom: Symptom, found: _Found) -> Check:
    times = "" if found.count == 1 else f", {found.count} times in all"
    said = f"line {found.line}{times}: {found.said}"
    return Check(symptom.name, symptom.status, said, _EXPECTED, symptom.fix)
