import pytest

from vllm_dcp_mla.cli import selftest as module
from vllm_dcp_mla.cli.main import main


@pytest.mark.vllm
@pytest.mark.parametrize(("value", "said"), [("1", True), ("0", False), (None, False)])
def test_a_package_that_is_switched_off_is_tested_and_said(monkeypatch, capsys, value, said):
    ran = []
    monkeypatch.setattr(module, "_run", lambda *arguments: ran.append(arguments))
    if value is None:
        monkeypatch.delenv("VLLM_DCP_MLA_DISABLE", raising=False)
    else:
        monkeypatch.setenv("VLLM_DCP_MLA_DISABLE", value)
    assert main(["selftest", "--json"]) == 0
    assert len(ran) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert ("VLLM_DCP_MLA_DISABLE is set" in err) is said


@pytest.mark.parametrize("size", ["3", "6", "12"])
def test_ranks_that_do_not_divide_the_models_heads_are_refused(capsys, size):
    assert main(["selftest", "--ranks", size]) == 1
    err = capsys.readouterr().err
    assert f"--tensor-parallel-size is {size}, which does not divide the model's 64 query" in err
    assert "use one of 1, 2, 4, 8" in err
