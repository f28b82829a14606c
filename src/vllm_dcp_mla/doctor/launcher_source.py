"""Reads FlashInfer's trtllm-gen launcher: does it still size its workspace as planned for?

Text in, findings out. Each assumption of :mod:`..workspace` has one pattern; whatever else the file
holds is of no interest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..workspace import STATS_BYTES_PER_SLOT, STATS_GUARD_BYTES, STATS_SLOT_ROUNDING

#: Path below FlashInfer's package folder.
LAUNCHER = "data/csrc/trtllm_fmha_kernel_launcher.cu"

_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_GUARD = re.compile(r"constexpr\s+size_t\s+k\w*SoftmaxStatsGuardBytes\s*=\s*([\d\s*']+);")
_SLOTS = re.compile(r"size_t\s+(?:const\s+)?softmax_slots\s*=\s*([^;]+);")
_SLAB = re.compile(r"softmaxStatsPtr\s*=\s*\w+\.aligned_alloc<(\w+)>\(\s*([^,]+),")
_ROUNDED = re.compile(r"round_up\(\s*max_q_len\s*,\s*(?:int64_t\s*[({]\s*)?(\d+)\s*[)}]?\s*\)")
_SCRATCH = re.compile(
    r"(\w+)\.aligned_alloc<\w+>\(\s*(\d+)\s*,\s*\d+\s*,\s*\"trtllm_gen_scratch_workspace\""
)
_COUNTERS = re.compile(
    r"multiCtasKvCounterPtr\s*=\s*reinterpret_cast<\w+\*>\(\s*multi_ctas_kv_counter_buffer\s*\)"
)
_COUNTER_SLOTS = re.compile(
    r"round_up\(\s*std::max\(\s*request_counter_slots\s*,\s*sm_counter_slots\s*\)\s*,"
    r"\s*(?:static_cast<size_t>\(\s*)?(\d+)"
)
_REQUEST_SLOTS = re.compile(r"request_counter_slots\s*=\s*([^;]+);")
_COUNTER_SIZE = re.compile(r"num_semaphores\s*\*\s*sizeof\(\s*(\w+)\s*\)")

_SIZES = {"float": 4, "float2": 8, "float4": 16, "uint32_t": 4, "int32_t": 4, "uint64_t": 8}
_COUNTER_ROUNDING = 8
_COUNTER_BYTES = 4


@dataclass(frozen=True, slots=True)
class Difference:
    """Something the launcher does otherwise than this package assumes."""

    what: str
    found: str
    assumed: str

    def __str__(self) -> str:
        return f"{self.what}: {self.found}, assumed {self.assumed}"


def read_launcher(source: str) -> list[Difference]:
    """Compares a launcher's source with what the workspace is planned by; empty when it agrees."""
    code = _COMMENTS.sub(" ", source)
    differences = [
        _compare("bytes behind the slab", _guard_bytes(code), STATS_GUARD_BYTES),
        _compare("rounding of the query length", _slot_rounding(code), STATS_SLOT_ROUNDING),
        _compare("factors of the slab's slots", _factors(_SLOTS, code), _slab_factors()),
        _compare("bytes of a slot", _slot_bytes(code), STATS_BYTES_PER_SLOT),
        _compare("size of the slab", _slab_terms(code), ("guard", "slots")),
        _compare("slab is taken before the scratch", _slab_first(code), True),
        _compare("bytes asked for as scratch", _scratch_bytes(code), 0),
        _compare("counters lie in a buffer of their own", bool(_COUNTERS.search(code)), True),
        _compare(
            "factors of the counters",
            _factors(_REQUEST_SLOTS, code),
            ("batch_size", "num_qo_heads"),
        ),
        _compare("rounding of the counters", _first_int(_COUNTER_SLOTS, code), _COUNTER_ROUNDING),
        _compare("bytes of a counter", _counter_size(code), _COUNTER_BYTES),
    ]
    return [difference for difference in differences if difference is not None]


def _compare(what: str, found: object, assumed: object) -> Difference | None:
    if found == assumed:
        return None
    return Difference(what, "not found" if found is None else _shown(found), _shown(assumed))


def _shown(value: object) -> str:
    return " x ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _slab_factors() -> tuple[str, ...]:
    return ("batch_size", "num_qo_heads", "round_up(max_q_len)")


def _guard_bytes(code: str) -> int | None:
    match = _GUARD.search(code)
    if match is None:
        return None
    product = 1
    for factor in match[1].replace("'", "").split("*"):
        if not factor.strip().isdigit():
            return None
        product *= int(factor)
    return product


def _slot_rounding(code: str) -> int | None:
    slots = _SLOTS.search(code)
    return _first_int(_ROUNDED, slots[1]) if slots else None


def _first_int(pattern: re.Pattern[str], code: str) -> int | None:
    match = pattern.search(code)
    return int(match[1]) if match else None


def _factors(pattern: re.Pattern[str], code: str) -> tuple[str, ...] | None:
    """The factors of a product, casts and spaces left off, in alphabetical order."""
    match = pattern.search(code)
    if match is None:
        return None
    product = _ROUNDED.sub("round_up(max_q_len)", match[1])
    product = re.sub(r"static_cast<\w+>\(((?:[^()]|\([^()]*\))*)\)", r"\1", product)
    return tuple(sorted(factor.strip() for factor in product.split("*")))


def _slot_bytes(code: str) -> int | None:
    match = _SLAB.search(code)
    sized = re.search(r"sizeof\(\s*(\w+)\s*\)", match[2]) if match else None
    return _SIZES.get(sized[1]) if sized else None


def _slab_terms(code: str) -> tuple[str, ...] | None:
    """What the slab's size is a sum of: ``slots`` is slots times a slot's bytes."""
    match = _SLAB.search(code)
    if match is None:
        return None
    terms = []
    for term in match[2].split("+"):
        factors = {factor.strip() for factor in term.split("*")}
        sized = {factor for factor in factors if factor.startswith("sizeof")}
        if factors - sized == {"softmax_slots"} and len(sized) == 1:
            terms.append("slots")
        elif re.fullmatch(r"k\w*SoftmaxStatsGuardBytes", term.strip()):
            terms.append("guard")
        else:
            terms.append(term.strip())
    return tuple(sorted(terms))


def _slab_first(code: str) -> bool | None:
    slab, scratch = _SLAB.search(code), _SCRATCH.search(code)
    return slab.start() < scratch.start() if slab and scratch else None


def _scratch_bytes(code: str) -> int | None:
    match = _SCRATCH.search(code)
    return int(match[2]) if match else None


def _counter_size(code: str) -> int | None:
    match = _COUNTER_SIZE.search(code)
    return _SIZES.get(match[1]) if match else None
