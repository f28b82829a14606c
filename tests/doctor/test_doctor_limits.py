import importlib.util

import pytest

from release_marks import gathers_here
from vllm_dcp_mla.doctor.limits import check_limits
from vllm_dcp_mla.planner.request import RawRequest, read_request

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="FLASHINFER_MLA_SPARSE serves"
)


def request(gpu="b200", tp="8", pcp="1", dcp="8", comm=None):
    return read_request(RawRequest("glm-5.2-fp8", gpu, tp, pcp, dcp, "auto", "8192", comm))


def only(environ, **changes):
    (check,) = check_limits(request(**changes), environ)
    return check


def test_the_defaults_have_room():
    check = only({})
    assert (check.status, check.fix) == ("pass", "")


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("VLLM_DCP_MLA_SLAB_LIMIT_BYTES", "slab_limit_bytes is 1000, but one token of 64 heads"),
        ("VLLM_DCP_MLA_MERGE_LIMIT_BYTES", "merge_limit_bytes is 1000, but one row of top-k 2048"),
        ("VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE", "1000 bytes does not hold one token of 64 heads"),
    ],
)
def test_a_limit_that_an_engine_stops_at_fails(variable, said):
    check = only({variable: "1000"})
    assert check.status == "fail"
    assert said in check.found
    assert variable in check.found


def test_a_limit_that_nothing_uses_there_passes():
    gather = {"VLLM_DCP_MLA_GATHER_LIMIT_BYTES": "1000"}
    assert only(gather).status == "pass"


@gathers_here
def test_the_gather_limit_counts_under_pcp():
    gather = {"VLLM_DCP_MLA_GATHER_LIMIT_BYTES": "1000"}
    check = only(gather, tp="1", pcp="4", dcp="4", comm="ag_rs")
    assert check.status == "fail"
    assert "gather_limit_bytes is 1000" in check.found


@pytest.mark.parametrize(
    ("environ", "changes"),
    [
        ({"VLLM_DCP_MLA_SLAB_LIMIT_BYTES": "many"}, {}),
        ({"VLLM_DCP_MLA_SLAB_LIMIT_BYTES": "1000", "VLLM_DCP_MLA_DISABLE": "1"}, {}),
        ({"VLLM_DCP_MLA_SLAB_LIMIT_BYTES": "1000", "VLLM_DCP_MLA_KERNEL": "flashmla"}, {}),
        ({"VLLM_DCP_MLA_SLAB_LIMIT_BYTES": "1000"}, {"dcp": "1"}),
    ],
)
def test_nothing_is_said_where_no_limit_is_looked_at(environ, changes):
    assert check_limits(request(**changes), environ) == []
