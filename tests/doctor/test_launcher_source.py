"""The reader on FlashInfer's real launcher, and on copies of it with one thing altered."""

import importlib.util
import re
from pathlib import Path

import pytest

from vllm_dcp_mla.doctor.launcher_source import LAUNCHER, read_launcher

_SPEC = importlib.util.find_spec("flashinfer")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(_SPEC is None, reason="needs FlashInfer installed"),
]


@pytest.fixture(scope="module")
def launcher():
    return (Path(_SPEC.submodule_search_locations[0]) / LAUNCHER).read_text()


def noticed(source):
    return [difference.what for difference in read_launcher(source)]


def test_the_installed_launcher_is_as_assumed(launcher):
    assert read_launcher(launcher) == []


@pytest.mark.parametrize(
    ("pattern", "replacement", "what"),
    [
        (r"GuardBytes = 1 \*", "GuardBytes = 2 *", "bytes behind the slab"),
        (r"GuardBytes = 1 \* 1024 \* 1024", "GuardBytes = kMiB", "bytes behind the slab"),
        (r"int64_t\{256\}", "int64_t{128}", "rounding of the query length"),
        (r"round_up\(max_q_len, int64_t\{256\}\)", "max_q_len", "rounding of the query length"),
        (r"sizeof\(float2\) \* softmax_slots", "sizeof(float4) * softmax_slots", "bytes of a slot"),
        (
            r"softmax_slots \+ kTrtllmGenSoftmaxStatsGuardBytes",
            "softmax_slots",
            "size of the slab",
        ),
        (
            r"softmax_slots \+ kTrtllmGenSoftmaxStatsGuardBytes",
            "softmax_slots * 2 + kTrtllmGenSoftmaxStatsGuardBytes",
            "size of the slab",
        ),
        (
            r"softmax_slots = static_cast<size_t>\(num_qo_heads\)",
            "softmax_slots = static_cast<size_t>(num_qo_heads) * 2",
            "factors of the slab's slots",
        ),
        (
            r"softmax_slots = static_cast<size_t>\(num_qo_heads\) \*",
            "softmax_slots =",
            "factors of the slab's slots",
        ),
        (
            r'aligned_alloc<void>\(0, 16, "trtllm_gen_scratch',
            'aligned_alloc<void>(4096, 16, "trtllm_gen_scratch',
            "bytes asked for as scratch",
        ),
        (
            r"reinterpret_cast<int32_t\*>\(multi_ctas_kv_counter_buffer\)",
            'float_allocator.aligned_alloc<int32_t>(8 << 20, 16, "counters")',
            "counters lie in a buffer of their own",
        ),
        (
            r"request_counter_slots =\s+static_cast<size_t>\(batch_size\)",
            "request_counter_slots = 2 * static_cast<size_t>(batch_size)",
            "factors of the counters",
        ),
        (r"static_cast<size_t>\(8\)", "static_cast<size_t>(64)", "rounding of the counters"),
        (
            r"num_semaphores \* sizeof\(uint32_t\)",
            "num_semaphores * sizeof(uint64_t)",
            "bytes of a counter",
        ),
    ],
)
def test_each_alteration_is_noticed(launcher, pattern, replacement, what):
    altered, count = re.subn(pattern, replacement, launcher, count=1)
    assert count == 1
    assert what in noticed(altered)


def test_a_scratch_that_is_taken_first_is_noticed(launcher):
    scratch = 'a.aligned_alloc<void>(0, 16, "trtllm_gen_scratch_workspace");\n'
    assert noticed(scratch + launcher) == ["slab is taken before the scratch"]


def test_a_commented_out_line_does_not_count(launcher):
    altered = launcher.replace("constexpr size_t kTrtllm", "// constexpr size_t kTrtllm")
    assert altered != launcher
    assert "bytes behind the slab" in noticed(altered)


def test_an_empty_file_lacks_everything():
    differences = read_launcher("")
    assert len(differences) == 11
    assert all("assumed" in str(difference) for difference in differences)
