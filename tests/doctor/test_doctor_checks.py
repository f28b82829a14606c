import pytest

from vllm_dcp_mla.compat import flashinfer
from vllm_dcp_mla.doctor import flashinfer_source, machine, versions
from vllm_dcp_mla.doctor.processes import Probed
from vllm_dcp_mla.doctor.report import Check, Report
from vllm_dcp_mla.planner import local_gpu
from vllm_dcp_mla.simulate.gpus import GPUS

NAME = "trtllm_batch_decode_with_kv_cache_mla"


def statuses(monkeypatch, **installed):
    found = {name.replace("_", "-"): version for name, version in installed.items()}
    monkeypatch.setattr(versions, "installed_version", found.get)
    return {check.name: check.status for check in versions.check_versions()}


GOOD = {"vllm": "0.33.0", "torch": "2.14.0", "triton": "3.8.0", "flashinfer_python": "0.7.2.post1"}


def test_what_is_tested_passes(monkeypatch):
    assert set(statuses(monkeypatch, **GOOD).values()) == {"pass"}


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"vllm": None}, "vllm"),
        ({"vllm": "0.28.1"}, "vllm"),
        ({"vllm": "0.34.0"}, "vllm"),
        ({"vllm": "built today"}, "vllm"),
        ({"torch": None}, "torch"),
        ({"triton": None}, "triton"),
        ({"flashinfer_python": None}, "flashinfer-python"),
        ({"flashinfer_python": "0.6.12"}, "flashinfer-python"),
        ({"flashinfer_python": "0.6.14rc1"}, "flashinfer-python"),
        ({"flashinfer_cubin": "0.6.13"}, "flashinfer-cubin"),
    ],
)
def test_each_wrong_version_fails(monkeypatch, changed, name):
    got = statuses(monkeypatch, **{**GOOD, **changed})
    assert [n for n, status in got.items() if status == "fail"] == [name]


def test_cubins_of_the_same_version_pass(monkeypatch):
    assert statuses(monkeypatch, **GOOD, flashinfer_cubin="0.7.2.post1")["flashinfer-cubin"] == (
        "pass"
    )


@pytest.mark.parametrize(
    ("found", "file", "status"),
    [
        ({}, True, "pass"),
        ({"cuda_python": "13.4.4", "cuda_bindings": "13.4.4"}, True, "pass"),
        ({"cuda_python": "12.6.2.post1"}, True, "pass"),
        ({"cuda_python": "12.6.2.post1", "cuda_bindings": "12.6.2"}, True, "pass"),
        ({"cuda_python": "12.6.2.post1", "cuda_bindings": "13.5.0"}, True, "warn"),
        ({"cuda_python": "13.4.4", "cuda_bindings": "13.5.0"}, False, "fail"),
    ],
)
def test_cuda_packages_that_overwrite_each_other(monkeypatch, tmp_path, found, file, status):
    (tmp_path / "bindings").mkdir()
    if file:
        (tmp_path / "bindings" / "driver.so").touch()
    monkeypatch.setattr(versions, "package_folder", {"cuda": tmp_path}.get)
    assert statuses(monkeypatch, **GOOD, **found)["cuda-python"] == status


def test_both_versions_of_a_mismatch_are_named(monkeypatch):
    found = {"flashinfer-python": "0.6.14", "flashinfer-cubin": "0.6.13"}
    monkeypatch.setattr(versions, "installed_version", found.get)
    (check,) = (c for c in versions.check_versions() if c.name == "flashinfer-cubin")
    assert check.found == "0.6.13, flashinfer-python is 0.6.14"
    assert check.fix == "pip install flashinfer-cubin==0.6.14"


def test_an_untested_vllm_that_is_allowed_warns(monkeypatch):
    monkeypatch.setenv("VLLM_DCP_MLA_ALLOW_UNTESTED", "1")
    assert statuses(monkeypatch, **{**GOOD, "vllm": "0.34.0"})["vllm"] == "warn"


def test_a_vllm_whose_source_is_broken_is_one_failure(monkeypatch):
    def broken():
        raise SyntaxError("invalid syntax")

    monkeypatch.setattr(versions, "missing_symbols", broken)
    assert versions.check_symbols().status == "fail"


@pytest.fixture
def fake_flashinfer(monkeypatch, tmp_path):
    (tmp_path / "mla").mkdir()
    monkeypatch.setattr(flashinfer_source, "package_folder", lambda name: tmp_path)
    return tmp_path


def define(arguments):
    return f"def {NAME}({', '.join(arguments)}): ..."


def test_the_function_is_found_wherever_it_is_defined(fake_flashinfer):
    required = flashinfer.REQUIRED_ARGUMENTS
    (fake_flashinfer / "decode.py").write_text(f"from .deep.er import {NAME}")
    (fake_flashinfer / "deep").mkdir()
    (fake_flashinfer / "deep" / "er.py").write_text(define([*required, "more=1"]))
    assert flashinfer_source.check_signature().status == "pass"


def test_each_lost_argument_is_named(fake_flashinfer):
    required = flashinfer.REQUIRED_ARGUMENTS
    assert len(required) > 10
    for lost in required:
        kept = [argument for argument in required if argument != lost]
        (fake_flashinfer / "decode.py").write_text(define(kept))
        check = flashinfer_source.check_signature()
        assert (check.status, check.found.endswith(f"lacks {lost}")) == ("fail", True)


@pytest.mark.parametrize("source", [b"", b"def broken(:", b"\0def " + NAME.encode()])
def test_a_flashinfer_without_the_function_fails(fake_flashinfer, source):
    (fake_flashinfer / "decode.py").write_bytes(source)
    assert flashinfer_source.check_signature().status == "fail"


def test_a_launcher_that_is_not_shipped_warns(fake_flashinfer):
    assert flashinfer_source.check_launcher().status == "warn"


def test_an_altered_launcher_fails(fake_flashinfer):
    path = fake_flashinfer / flashinfer_source.LAUNCHER
    path.parent.mkdir(parents=True)
    path.write_text("nothing of what is looked for")
    assert flashinfer_source.check_launcher().status == "fail"


def test_no_flashinfer_fails(monkeypatch):
    monkeypatch.setattr(flashinfer_source, "package_folder", lambda name: None)
    assert flashinfer_source.check_signature().status == "fail"
    assert flashinfer_source.check_launcher().status == "fail"


def test_libraries_are_found_by_file(monkeypatch, tmp_path):
    def folder(name):
        return tmp_path if name == "vllm" else None

    monkeypatch.setattr(machine, "package_folder", folder)
    assert [c.status for c in machine.check_libraries()] == ["fail", "fail", "warn", "warn"]
    (tmp_path / "third_party" / "deep_gemm").mkdir(parents=True)
    (tmp_path / "third_party" / "deep_gemm" / "__init__.py").write_text("")
    (tmp_path / "_flashmla_C.abi3.so").write_text("")
    assert [c.status for c in machine.check_libraries()] == ["pass", "fail", "warn", "warn"]
    (tmp_path / "_flashmla_extension_C.abi3.so").write_text("")
    (tmp_path / "vllm_flash_attn").mkdir()
    (tmp_path / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so").write_text("")
    monkeypatch.setattr(
        machine, "package_folder", lambda name: None if name == "deep_gemm" else tmp_path
    )
    assert {c.status for c in machine.check_libraries()} == {"pass"}


def probed(available, build="13.0"):
    return Probed({"torch": {"cuda_build": build, "cuda_available": available}})


def test_a_gpu_that_torch_cannot_use_fails(monkeypatch):
    monkeypatch.setattr(local_gpu, "detect", lambda: GPUS["h200"])
    assert machine.check_gpu(probed(True)).status == "pass"
    assert machine.check_gpu(probed(False)).status == "fail"
    assert "SM90" in machine.check_gpu(probed(True)).found


def test_no_gpu_is_no_failure(monkeypatch):
    def none():
        raise local_gpu.NoGpuError("no NVIDIA driver")

    monkeypatch.setattr(local_gpu, "detect", none)
    check = machine.check_gpu(probed(False))
    assert (check.status, check.found) == ("warn", "no GPU here: no NVIDIA driver")


def test_torch_without_cuda_fails():
    assert machine.check_torch(probed(True)).status == "pass"
    assert machine.check_torch(probed(False, build=None)).status == "fail"
    assert machine.check_torch(Probed({}, "exit status 1")).status == "fail"


def test_a_warning_leaves_the_report_good():
    checks = [Check("a", "pass", "", ""), Check("b", "warn", "", "")]
    assert Report(checks).ok
    assert not Report([*checks, Check("c", "fail", "", "")]).ok
