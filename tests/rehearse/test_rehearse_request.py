from pathlib import Path

import pytest

from vllm_dcp_mla.planner.request import IMPOSSIBLE, UNREADABLE, RawRequest, RequestError
from vllm_dcp_mla.rehearse.config import INDEX_TOPK, SCORES
from vllm_dcp_mla.rehearse.configuration import Limits, engine_of
from vllm_dcp_mla.rehearse.faults import FAULTS
from vllm_dcp_mla.rehearse.machine import LocalGpu, Machine
from vllm_dcp_mla.rehearse.request import RawRehearsal, read_rehearsal

GIB = 1 << 30


def raw(**more):
    usual = {"model": "glm-5.2", "gpu": "b200", "tp": "2", "pcp": "1", "dcp": "2"}
    rest = {"kv_cache_dtype": "auto", "max_num_batched_tokens": "8192", "comm": None}
    return RawRequest(**{**usual, **rest, **more})


def more(**given):
    usual = {
        "mtp": "0",
        "graphs": "none",
        "index_topk": "",
        "scores": "normal",
        "ranks_per_gpu": "auto",
    }
    rest = {"time_limit": "600", "long_prompt": "0", "fault": "", "soak": "0", "cover": False}
    return RawRehearsal(**{**usual, **rest, **given})


def machine(arch, name="NVIDIA H200"):
    one = LocalGpu(name=name, arch=arch, total_bytes=141 * GIB, free_bytes=140 * GIB)
    return Machine(gpus=(one,), nccl=(2, 30, 3), versions={})


def refused(raw_request=None, **given):
    with pytest.raises(RequestError) as caught:
        read_rehearsal(raw_request or raw(), more(**given))
    return caught.value


def test_the_usual_flags():
    read = read_rehearsal(raw(), more())
    options = read.options
    assert (read.mtp, read.graphs, read.cover) == (0, "none", False)
    assert (options.index_topk, options.ranks_per_gpu, options.engine_seconds) == (None, None, 600)
    assert (options.fault, options.soak_seconds, options.long_tokens) == (None, None, 0)
    assert (options.max_num_batched_tokens, options.scores) == (8192, "normal")


def test_every_flag_arrives():
    given = more(mtp="3", graphs="full", index_topk="512", ranks_per_gpu="4", time_limit="90")
    read = read_rehearsal(raw(max_num_batched_tokens="4096"), given)
    options = read.options
    assert (read.mtp, read.graphs, options.index_topk) == (3, "full", 512)
    assert (options.ranks_per_gpu, options.engine_seconds) == (4, 90)
    assert options.max_num_batched_tokens == 4096
    assert read_rehearsal(raw(), more(soak="8")).options.soak_seconds == 480
    assert read_rehearsal(raw(), more(long_prompt="131072")).options.long_tokens == 131072
    for name, fault in FAULTS.items():
        assert read_rehearsal(raw(), more(fault=name)).options.fault is fault
    for scores in SCORES:
        assert read_rehearsal(raw(), more(scores=scores)).options.scores == scores
    for topk in INDEX_TOPK:
        assert read_rehearsal(raw(), more(index_topk=str(topk))).options.index_topk == topk


@pytest.mark.parametrize(
    ("flag", "field", "values"),
    [
        ("--mtp", "mtp", ["-1", "9", "x", "", "1.5"]),
        ("--time-limit", "time_limit", ["9", "86401", "ten", "-600", "nan"]),
        ("--soak", "soak", ["-1", "1441", "x"]),
        ("--long-prompt", "long_prompt", ["-1", "1048577", "x"]),
        ("--ranks-per-gpu", "ranks_per_gpu", ["0", "65", "-2", "Auto"]),
        ("--graphs", "graphs", ["", "eager", "FULL"]),
        ("--index-topk", "index_topk", ["2047", "x", "-512"]),
        ("--scores", "scores", ["", "Heavy", "gumbel"]),
        ("--break", "fault", ["none", "KILL-START"]),
    ],
)
def test_a_flag_out_of_range_is_one_sentence(flag, field, values):
    for value in values:
        error = refused(**{field: value})
        assert error.exit_code == UNREADABLE
        (problem,) = error.problems
        assert problem.startswith(f"{flag} is {value!r}")
        assert problem.endswith(".")
        assert "must be" in problem or "use one of" in problem


def test_a_long_value_is_cut():
    (problem,) = refused(mtp="9" * 5000).problems
    assert len(problem) < 120


def test_all_that_is_wrong_is_said_at_once():
    error = refused(raw(tp="x", model="/no/model"), mtp="x", graphs="x")
    assert error.exit_code == UNREADABLE
    assert [p.split(" is ")[0] for p in error.problems] == ["--mtp", "--graphs", "--tp", "--model"]


def test_one_rank_has_nothing_to_compare():
    error = refused(raw(tp="1", dcp="1"))
    assert error.exit_code == IMPOSSIBLE
    assert error.problems == [
        "--tp and --pcp are 1: one rank is what a rehearsal compares with; use 2."
    ]


@pytest.mark.parametrize("sizes", [{"tp": "2", "dcp": "3"}, {"tp": "3", "dcp": "1"}, {"tp": "0"}])
def test_impossible_sizes(sizes):
    assert refused(raw(**sizes)).exit_code == IMPOSSIBLE


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ({"fault": "kill-serving", "soak": "3"}, "--soak and --break"),
        ({"cover": True, "soak": "3"}, "--cover and --soak"),
        ({"cover": True, "fault": "kill-serving"}, "--cover and --break"),
    ],
)
def test_what_takes_the_place_of_a_comparison_excludes_the_others(given, flags):
    error = refused(**given)
    assert error.exit_code == IMPOSSIBLE
    assert error.problems == [f"{flags} are given together; leave all but one out."]


@pytest.mark.parametrize("other", [{"soak": "1"}, {"fault": "port-taken"}])
def test_a_long_prompt_goes_with_a_comparison_only(other):
    error = refused(long_prompt="4096", **other)
    assert error.exit_code == IMPOSSIBLE
    assert "--long-prompt" in error.problems[0]


@pytest.mark.parametrize(("model", "cover"), [("deepseek-v3.2", False), ("glm-5.2", True)])
def test_a_prompt_longer_than_a_model_serves_is_refused(model, cover):
    error = refused(raw(model=model), long_prompt="163840", cover=cover)
    (problem,) = error.problems
    assert problem == (
        "--long-prompt 163840 needs a context of 163904 tokens, and deepseek-v3.2 has 163840; "
        "give a shorter one."
    )


def test_a_request_is_rehearsed_with_and_without_dense_prefill():
    read = read_rehearsal(raw(kv_cache_dtype="bfloat16"), more(mtp="1", graphs="full"))
    sparse, dense = read.configurations(machine((9, 0)), "reference")
    assert (sparse.force_mqa, dense.force_mqa) == (True, False)
    assert (sparse.tp, sparse.dcp, sparse.mtp, sparse.graphs) == (2, 2, 1, "full")
    assert (sparse.kernel, sparse.kv_cache_dtype) == ("reference", "bfloat16")


@pytest.mark.parametrize("given", [{"soak": "1"}, {"fault": "kill-start"}])
def test_a_soak_or_a_fault_is_of_one_configuration(given):
    read = read_rehearsal(raw(), more(**given))
    (only,) = read.configurations(machine((9, 0)), "reference")
    assert only.force_mqa


def test_the_cover_is_rehearsed_instead():
    read = read_rehearsal(raw(), more(cover=True))
    assert len(read.configurations(machine((9, 0)), "reference")) <= 16


def test_hopper_is_rehearsed_with_its_own_class_and_what_vllm_selects_without_dcp():
    read = read_rehearsal(raw(kv_cache_dtype="bfloat16"), more())
    sparse, dense = read.configurations(machine((9, 0)), "auto")
    assert sparse.ours
    assert dense.ours
    engines = [
        engine_of(one, Path("/m"), Limits(3136, 8192), None, (9, 0))
        for one in (sparse, sparse.baseline(1))
    ]
    assert [engine.backend for engine in engines] == [None, None]
    assert len(read_rehearsal(raw(), more(cover=True)).configurations(machine((9, 0)), "auto")) > 4


@pytest.mark.parametrize(("arch", "kernel"), [((9, 0), "auto"), ((9, 0), "reference")])
@pytest.mark.parametrize("sizes", [("1", "2", "2"), ("2", "2", "2"), ("2", "2", "4")])
@pytest.mark.parametrize("cache", ["bfloat16", "fp8_e4m3"])
def test_pcp_with_dcp_is_rehearsed_on_our_classes_with_the_exchange_it_needs(
    arch, kernel, sizes, cache
):
    tp, pcp, dcp = sizes
    flags = {"tp": tp, "pcp": pcp, "dcp": dcp, "kv_cache_dtype": cache}
    sparse, _ = read_rehearsal(raw(**flags), more()).configurations(machine(arch), kernel)
    assert (sparse.pcp, sparse.comm, sparse.ours) == (int(pcp), "ag_rs", True)
    with pytest.raises(RequestError, match="PCP with DCP needs --dcp-comm-backend ag_rs, got a2a"):
        read_rehearsal(raw(**flags, comm="a2a"), more()).configurations(machine(arch), kernel)


@pytest.mark.parametrize(
    ("sizes", "cache", "ours"),
    [
        ({"tp": "2", "dcp": "2"}, "fp8_e4m3", True),  # FlashMLA's class refuses 32 heads a rank
        ({"tp": "4", "dcp": "2"}, "fp8_ds_mla", False),
    ],
)
def test_fp8_is_spelled_as_it_is_served_so_that_baselines_have_the_same_cache(sizes, cache, ours):
    read = read_rehearsal(raw(kv_cache_dtype="fp8", **sizes), more())
    for one in read.configurations(machine((9, 0)), "auto"):
        assert (one.kv_cache_dtype, one.ours) == (cache, ours)
        assert one.baseline(1).kv_cache_dtype == cache


@pytest.mark.parametrize("cover", [False, True])
def test_a_gpu_that_nothing_serves_names_the_reference_kernel(cover):
    read = read_rehearsal(raw(kv_cache_dtype="bfloat16"), more(cover=cover))
    with pytest.raises(RequestError) as caught:
        read.configurations(machine((8, 0), "NVIDIA A100"), "auto")
    assert caught.value.exit_code == IMPOSSIBLE
    (problem,) = caught.value.problems
    assert problem.startswith("Nothing serves this on NVIDIA A100: ")
    assert problem.endswith("VLLM_DCP_MLA_KERNEL=reference rehearses the SM100 classes on any GPU.")
    assert read.configurations(machine((8, 0)), "reference")
