import ctypes
import json

import pytest

from vllm_dcp_mla.planner import local_gpu
from vllm_dcp_mla.planner.request import RawRequest, RequestError, find_gpu, read_request

GOOD = {
    "num_attention_heads": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "index_topk": 2048,
}


def raw(**flags):
    defaults = {
        "model": "glm-5.2",
        "gpu": "b200",
        "tp": "8",
        "pcp": "1",
        "dcp": "8",
        "kv_cache_dtype": "auto",
        "max_num_batched_tokens": "8192",
        "comm": None,
    }
    return RawRequest(**{**defaults, **flags})


def refused(**flags):
    with pytest.raises(RequestError) as caught:
        read_request(raw(**flags))
    return caught.value


def write_config(folder, content):
    (folder / "config.json").write_bytes(content)
    return str(folder)


def test_every_unreadable_flag_is_named_at_once():
    error = refused(tp="x", dcp="1.5", gpu="a100", kv_cache_dtype="fp7", comm="nccl", model="gpt-2")
    assert error.exit_code == 2
    assert [problem.split()[0] for problem in error.problems] == [
        "--tp",
        "--dcp",
        "--gpu",
        "--kv-cache-dtype",
        "--comm",
        "--model",
    ]


def test_a_number_of_thousands_of_digits_is_refused_in_short():
    (problem,) = refused(tp="9" * 5000).problems
    assert len(problem) < 200


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff\xfe binary",
        b"{",
        b"[]",
        b"3",
        b'{"num_attention_heads": ' + b"9" * 5000 + b"}",
        b"[" * 200_000,
    ],
)
def test_an_unreadable_config_is_one_sentence(tmp_path, content):
    error = refused(model=write_config(tmp_path, content))
    assert (error.exit_code, len(error.problems)) == (2, 1)
    assert "config.json" in error.problems[0]


@pytest.mark.parametrize("model", ["", "no-such-folder", "x" * 5000, "nul\0byte"])
def test_no_folder_is_one_sentence(model):
    error = refused(model=model)
    assert (error.exit_code, len(error.problems)) == (2, 1)


def test_a_config_json_that_is_a_folder_is_refused(tmp_path):
    (tmp_path / "config.json").mkdir()
    assert refused(model=str(tmp_path)).exit_code == 2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("index_topk", None),
        ("kv_lora_rank", "512"),
        ("num_attention_heads", 0),
        ("num_attention_heads", 10**12),
        ("qk_rope_head_dim", -1),
        ("qk_nope_head_dim", True),
    ],
)
def test_a_model_that_is_no_sparse_mla_model_is_understood(tmp_path, key, value):
    config = {**GOOD, key: value}
    if value is None:
        del config[key]
    error = refused(model=write_config(tmp_path, json.dumps(config).encode()))
    assert error.exit_code == 1
    assert key in error.problems[0]


def test_a_folder_with_a_sparse_mla_model_is_read(tmp_path):
    request = read_request(raw(model=write_config(tmp_path, json.dumps(GOOD).encode())))
    assert request.dims.heads == 64
    assert request.problems() == []


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"dcp": "0"}, "--decode-context-parallel-size is 0"),
        ({"dcp": "-1"}, "--decode-context-parallel-size is -1"),
        ({"dcp": "3"}, "--decode-context-parallel-size is 3"),
        ({"dcp": "16"}, "--decode-context-parallel-size is 16"),
        ({"tp": "7", "dcp": "7"}, "--tensor-parallel-size is 7"),
        ({"tp": "1000000000000"}, "--tensor-parallel-size 1000000000000"),
        ({"max_num_batched_tokens": "0"}, "--max-num-batched-tokens is 0"),
        ({"max_num_batched_tokens": str(1 << 31)}, "--max-num-batched-tokens is 2147483648"),
    ],
)
def test_impossible_sizes_are_named(flags, named):
    (problem,) = read_request(raw(**flags)).problems()
    assert problem.startswith(named)
    assert "use" in problem or "leave" in problem


class FakeDriver:
    """The calls that a machine with one H200 would answer."""

    def __init__(self, init_status=0):
        self.init_status = init_status

    def cuInit(self, flags):  # noqa: N802
        return self.init_status

    def cuDeviceGet(self, device, ordinal):  # noqa: N802
        device._obj.value = ordinal
        return 0

    def cuDeviceGetName(self, name, size, device):  # noqa: N802
        name.value = b"NVIDIA H200"
        return 0

    def cuDeviceTotalMem_v2(self, memory, device):  # noqa: N802
        memory._obj.value = 150_000_000_000
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):  # noqa: N802
        value._obj.value = {16: 132, 75: 9, 76: 0}[attribute]
        return 0


def test_the_local_gpu_is_asked_of_the_driver(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver())
    gpu = find_gpu("local")
    assert (gpu.name, gpu.arch, gpu.sms) == ("NVIDIA H200", (9, 0), 132)
    assert gpu.memory_bytes == 150_000_000_000


def test_a_driver_without_a_gpu_says_its_error(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver(init_status=100))
    with pytest.raises(RequestError, match="error 100"):
        find_gpu("local")


def test_no_driver_is_one_sentence(monkeypatch):
    monkeypatch.setattr(local_gpu, "_LIBRARY", "libcuda-that-is-not-there.so")
    with pytest.raises(RequestError, match="no NVIDIA driver") as caught:
        find_gpu("local")
    assert caught.value.exit_code == 1
