from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dcp_mla import capability as cap
from vllm_dcp_mla import check_topology
from vllm_dcp_mla.compat.releases import RELEASES, release_of

LIBRARIES = cap.Libraries(flashinfer="0.7.2.post1", flashmla=True, flash_attn_4=True)
GLM = cap.ModelDims(64, 512, 192, 64, 2048)
DEEPSEEK = cap.ModelDims(128, 512, 128, 64, 2048)
B200, H200 = (10, 0), (9, 0)


def deployment(**changes) -> cap.Deployment:
    base = cap.Deployment(B200, "fp8_e4m3", 8, 1, 8, "a2a", GLM, LIBRARIES)
    return replace(base, **changes)


def serves(name, **changes) -> bool:
    return not cap.refusals(name, deployment(**changes))


@pytest.mark.parametrize("arch", [(10, 0), (10, 3)])
@pytest.mark.parametrize("cache", ["auto", "bfloat16", "fp8", "fp8_e4m3"])
@pytest.mark.parametrize("dims", [GLM, DEEPSEEK])
def test_sm100_serves_dcp(arch, cache, dims):
    assert serves(cap.FLASHINFER, arch=arch, kv_cache_dtype=cache, dims=dims)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"arch": (8, 0)}, "needs SM10x, got SM80"),
        ({"arch": (12, 0)}, "needs SM10x, got SM120"),
        ({"arch": H200}, "needs SM10x, got SM90"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "kv-cache-dtype fp8_ds_mla is not one of"),
        ({"tp": 1, "pcp": 4, "dcp": 4}, "PCP with DCP needs --dcp-comm-backend ag_rs, got a2a"),
        ({"dims": replace(GLM, heads=96)}, "65 to 127 query heads, got 96"),
        ({"dims": replace(GLM, qk_nope_head_dim=64)}, "must be 128 or 192, got 64"),
        ({"dims": replace(GLM, index_topk=None)}, "no index_topk"),
        ({"dims": replace(GLM, qk_rope_head_dim=0)}, "must be 256, got 192"),
        ({"libraries": replace(LIBRARIES, flashinfer=None)}, "FlashInfer is not installed"),
        ({"libraries": replace(LIBRARIES, flashinfer="0.6.12")}, "0.6.12 returns no LSE"),
    ],
)
def test_sm100_refusals(changes, reason):
    assert reason in "; ".join(cap.refusals(cap.FLASHINFER, deployment(**changes)))


@pytest.mark.parametrize("cache", ["auto", "bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize("dims", [GLM, DEEPSEEK, replace(GLM, heads=96), replace(GLM, heads=24)])
@pytest.mark.parametrize(("tp", "dcp"), [(2, 2), (4, 2), (4, 4), (8, 8)])
def test_sm90_serves_dcp_at_any_head_count(cache, dims, tp, dcp):
    changes = {"arch": H200, "kv_cache_dtype": cache, "dims": dims, "tp": tp, "dcp": dcp}
    assert serves(cap.FLASH_ATTN_3, **changes)
    assert not serves(cap.FLASHINFER, **changes)


@pytest.mark.parametrize("cache", ["auto", "bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize("dims", [GLM, DEEPSEEK])
@pytest.mark.parametrize(("tp", "pcp", "dcp"), [(1, 2, 2), (1, 4, 4), (2, 2, 2), (2, 2, 4)])
@pytest.mark.parametrize(("arch", "name"), [(B200, cap.FLASHINFER), (H200, cap.FLASH_ATTN_3)])
def test_pcp_with_dcp_is_served_with_one_exchange(cache, dims, tp, pcp, dcp, arch, name):
    changes = {"tp": tp, "pcp": pcp, "dcp": dcp, "arch": arch, "dims": dims}
    assert serves(name, kv_cache_dtype=cache, comm="ag_rs", **changes)
    assert not serves(name, kv_cache_dtype=cache, comm="a2a", **changes)


def test_with_pcp_prefill_rows_have_the_heads_of_one_rank():
    wide = {"tp": 2, "pcp": 2, "dims": replace(GLM, heads=192), "comm": "ag_rs"}
    assert deployment(**wide, dcp=4).launch_heads == (192, 96)
    assert deployment(**wide, dcp=2).launch_heads == (96,)
    assert deployment(tp=2, dcp=2, dims=replace(GLM, heads=192)).launch_heads == (192,)
    assert not serves(cap.FLASHINFER, **wide, dcp=4)
    assert serves(cap.FLASHINFER, tp=2, dcp=2, dims=replace(GLM, heads=192))
    forced = {"arch": H200, "kv_cache_dtype": "bfloat16", "kernel": "flashmla", "comm": "ag_rs"}
    spanning = deployment(tp=16, pcp=2, dcp=32, **forced)
    assert spanning.launch_heads == (64, 4)
    assert "heads a launch, got 4" in "; ".join(cap.refusals(cap.FLASH_ATTN_3, spanning))


@pytest.mark.parametrize(
    ("tp", "dcp", "dims", "by"),
    [
        # Where FlashMLA's constructors raise, fp8 is ours, with one scale.
        (2, 2, GLM, cap.FLASH_ATTN_3),
        (2, 2, DEEPSEEK, cap.FLASH_ATTN_3),
        (4, 2, DEEPSEEK, cap.FLASH_ATTN_3),
        (8, 8, DEEPSEEK, cap.FLASH_ATTN_3),
        (4, 2, GLM, cap.FLASHMLA),
        (8, 8, GLM, cap.FLASHMLA),
    ],
)
def test_fp8_on_sm90_is_flashmlas_where_that_works(tp, dcp, dims, by):
    d = deployment(arch=H200, kv_cache_dtype="fp8", tp=tp, dcp=dcp, dims=dims)
    assert cap.serving(d) == by
    assert (cap.refusals(cap.FLASH_ATTN_3, d) == []) is (by == cap.FLASH_ATTN_3)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"arch": B200}, "needs SM9x, got SM100"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "kv-cache-dtype fp8_ds_mla is not one of"),
        ({"kv_cache_dtype": "fp8"}, "fp8 is fp8_ds_mla here, which FLASHMLA_SPARSE serves"),
        ({"tp": 1, "pcp": 4, "dcp": 4}, "PCP with DCP needs --dcp-comm-backend ag_rs, got a2a"),
        ({"dims": replace(GLM, kv_lora_rank=256)}, "got 256 and 64"),
        ({"dims": replace(GLM, index_topk=None)}, "no index_topk"),
        ({"kernel": "trtllm_gen"}, "trtllm_gen is not one of this backend's"),
        ({"kernel": "reference"}, "reference is not one of this backend's"),
        ({"kernel": "flashmla"}, "flashmla reads a bf16 cache, got fp8_e4m3"),
        ({"kernel": "flash_attn3"}, "flash_attn3 reads a bf16 cache, got fp8_e4m3"),
    ],
)
def test_sm90_refusals(changes, reason):
    d = deployment(**{"arch": H200, **changes})
    assert reason in "; ".join(cap.refusals(cap.FLASH_ATTN_3, d))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dims": replace(GLM, heads=24)}, "takes 8, 16, 32, 64, 128 heads a launch, got 24"),
        ({"dims": replace(GLM, index_topk=100)}, "multiple of 128, got 100"),
        ({"libraries": replace(LIBRARIES, flashmla=False)}, "built without FlashMLA"),
        ({"dims": replace(GLM, qk_rope_head_dim=0)}, "needs rotary dims"),
        (
            {"kernel": "flash_attn3", "libraries": replace(LIBRARIES, flash_attn_3=False)},
            "built without FlashAttention 3",
        ),
        ({}, ""),
    ],
)
def test_what_flashmlas_kernel_takes_when_it_is_forced(changes, reason):
    forced = {"arch": H200, "kv_cache_dtype": "bfloat16", "kernel": "flashmla"}
    reasons = cap.refusals(cap.FLASH_ATTN_3, deployment(**{**forced, **changes}))
    assert reason in "; ".join(reasons)
    assert bool(reasons) is bool(reason)


def test_a_forced_kernel_of_another_backend_is_refused_and_stocks_class_does_not_mind():
    forced = {"kernel": "triton_decode"}
    assert not serves(cap.FLASHINFER, **forced)
    assert serves(cap.FLASHMLA, arch=H200, kv_cache_dtype="fp8_ds_mla", **forced)


def test_nope_model_is_served():
    assert serves(cap.FLASHINFER, dims=replace(GLM, qk_nope_head_dim=256, qk_rope_head_dim=0))


def test_the_reference_kernel_needs_neither_gpu_nor_library():
    nothing = cap.Libraries(None, False, False)
    assert serves(cap.FLASHINFER, arch=(8, 9), libraries=nothing, kernel="reference")
    assert not serves(cap.FLASHMLA, arch=(8, 9), libraries=nothing, kernel="reference")


@pytest.mark.parametrize(
    ("arch", "dims", "tp", "pcp", "dcp", "cache", "served"),
    [
        # What stock's constructors do, by running them (Hopper and Blackwell).
        (H200, GLM, 2, 1, 2, "auto", False),
        (H200, GLM, 2, 1, 2, "fp8_ds_mla", False),
        (H200, GLM, 4, 1, 2, "fp8_ds_mla", True),
        (H200, GLM, 8, 1, 8, "auto", False),
        (H200, GLM, 8, 1, 8, "fp8", True),
        (H200, GLM, 1, 4, 4, "fp8_ds_mla", True),
        (H200, DEEPSEEK, 2, 1, 2, "fp8_ds_mla", False),
        (H200, DEEPSEEK, 8, 1, 2, "fp8_ds_mla", True),
        (H200, DEEPSEEK, 8, 1, 8, "fp8_ds_mla", False),
        (B200, GLM, 2, 1, 2, "fp8_ds_mla", False),
        (B200, GLM, 2, 1, 2, "bfloat16", False),
        (B200, GLM, 1, 4, 4, "fp8_ds_mla", True),
        (B200, GLM, 1, 4, 4, "nvfp4_ds_mla", False),
        (H200, GLM, 8, 1, 8, "nvfp4_ds_mla", False),
    ],
)
def test_flashmla_says_what_its_constructors_do(arch, dims, tp, pcp, dcp, cache, served):
    changes = {"arch": arch, "dims": dims, "tp": tp, "pcp": pcp, "dcp": dcp}
    assert serves(cap.FLASHMLA, **changes, kv_cache_dtype=cache, comm="ag_rs") is served


def beside(version):
    return replace(LIBRARIES, release=release_of(version))


PCP = {"tp": 1, "pcp": 4, "dcp": 4, "comm": "ag_rs", "kv_cache_dtype": "fp8_ds_mla"}


@pytest.mark.parametrize(
    ("version", "name", "changes", "reason"),
    [
        ("0.29.0", cap.FLASHMLA, PCP, "PCP with DCP needs 0.30 or newer"),
        ("0.29.0", cap.FLASHINFER, PCP, "PCP with DCP needs 0.30 or newer"),
        ("0.30.0", cap.FLASHMLA, PCP, None),
        ("0.29.0", cap.FLASHINFER, {"interleave": 64}, "takes --cp-kv-cache-interleave-size 1"),
        ("0.30.0", cap.FLASHINFER, {"interleave": 64}, None),
        ("0.32.0", cap.FLASHMLA, {"kv_cache_dtype": "fp8_ds_mla"}, "ag_rs only under DCP, got a2a"),
        ("0.33.0", cap.FLASHMLA, {"kv_cache_dtype": "fp8_ds_mla"}, None),
        (
            "0.29.0",
            cap.FLASHMLA,
            {"kv_cache_dtype": "nvfp4_ds_mla", "comm": "ag_rs"},
            "has no nvfp4_ds_mla cache",
        ),
        ("0.32.0", cap.FLASH_ATTN_4, {"kv_cache_dtype": "bfloat16"}, "not served with vLLM 0.32"),
        ("0.33.0", cap.FLASH_ATTN_4, {"kv_cache_dtype": "bfloat16"}, None),
    ],
)
def test_refusals_of_a_release(version, name, changes, reason):
    d = deployment(libraries=beside(version), **changes)
    refused = cap.refusals(name, d)
    if reason is None:
        assert refused == []
    else:
        assert reason in "; ".join(refused)


def test_the_way_out_of_an_interleave_is_another_one():
    d = deployment(libraries=beside("0.29.0"), interleave=64)
    assert cap.suggestion(d) == "--cp-kv-cache-interleave-size 1 (served by FLASHINFER_MLA_SPARSE)"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"tp": 1, "pcp": 4, "dcp": 4},
            "--dcp-comm-backend ag_rs (served by FLASHINFER_MLA_SPARSE)",
        ),
        (
            {"tp": 1, "pcp": 4, "dcp": 4, "kv_cache_dtype": "nvfp4_ds_mla"},
            "--kv-cache-dtype fp8_e4m3 --dcp-comm-backend ag_rs (served by FLASHINFER_MLA_SPARSE)",
        ),
        ({"tp": 1, "pcp": 4, "dcp": 4, "kv_cache_dtype": "fp8_ds_mla"}, "--dcp-comm-backend ag_rs"),
        (
            {"tp": 1, "pcp": 4, "dcp": 4, "libraries": replace(LIBRARIES, flashinfer=None)},
            "--kv-cache-dtype fp8_ds_mla --dcp-comm-backend ag_rs (served by FLASHMLA_SPARSE)",
        ),
        ({"kv_cache_dtype": "fp8_ds_mla", "tp": 2, "dcp": 2}, "--kv-cache-dtype fp8_e4m3"),
        ({"kernel": "flashmla"}, "the setting kernel=auto (served by FLASHINFER_MLA_SPARSE)"),
        (
            {"tp": 1, "pcp": 4, "dcp": 4, "kernel": "flashmla"},
            "--dcp-comm-backend ag_rs the setting kernel=auto (served by FLASHINFER_MLA_SPARSE)",
        ),
    ],
)
def test_suggestion_is_the_nearest_that_works(changes, named):
    assert named in (cap.suggestion(deployment(**changes)) or "")


DEPLOYMENTS = st.builds(
    cap.Deployment,
    arch=st.sampled_from([(8, 0), (9, 0), (10, 0), (10, 3), (12, 0)]),
    kv_cache_dtype=st.sampled_from(["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla", "int8"]),
    tp=st.sampled_from([1, 2, 4, 8]),
    pcp=st.sampled_from([1, 2, 4]),
    dcp=st.sampled_from([2, 4, 8]),
    comm=st.sampled_from(["a2a", "ag_rs"]),
    dims=st.sampled_from([GLM, DEEPSEEK, replace(GLM, heads=96), replace(GLM, index_topk=None)]),
    libraries=st.builds(
        cap.Libraries,
        flashinfer=st.sampled_from([None, "0.6.12", "0.7.2.post1"]),
        flashmla=st.booleans(),
        flash_attn_4=st.booleans(),
        release=st.sampled_from(RELEASES),
    ),
    kernel=st.sampled_from(["auto", "reference", "triton_decode", "flashmla"]),
    interleave=st.sampled_from([1, 64]),
).filter(lambda d: not check_topology(d.tp, d.pcp, d.dcp, d.dims.heads))


def follow(d: cap.Deployment, flags: str) -> cap.Deployment:
    fields = {flag: field for field, flag in cap._FLAGS.items()} | {"kernel": "kernel"}
    words = flags.split(" (served by ")[0].replace("the setting kernel=", "kernel ").split()
    for flag, value in zip(words[::2], words[1::2], strict=True):
        old = getattr(d, fields[flag])
        d = replace(d, **{fields[flag]: type(old)(value)})
    return d


@given(DEPLOYMENTS)
def test_no_suggestion_fails_too(d):
    flags = cap.suggestion(d)
    if flags is None:
        assert cap.serving(d) is None
    elif " (served by " in flags:
        other = follow(d, flags)
        assert cap.serving(d) is None
        assert cap.serving(other) is not None
        assert other.tp * other.pcp == d.tp * d.pcp
    else:
        assert cap.serving(d) == flags


@given(DEPLOYMENTS, st.sampled_from([r.name for r in cap.TABLE]))
def test_an_explanation_stands_exactly_where_a_refusal_is(d, name):
    assert (cap.explain(name, d) is None) == (cap.refusals(name, d) == [])
