import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dcp_mla.rehearse.configuration import (
    ALIAS,
    COVER,
    Configuration,
    Limits,
    cover,
    engine_of,
    pairwise,
    with_baselines,
)
from vllm_dcp_mla.rehearse.engine import GRAPHS

LIMITS = Limits(3136, 8192)
H200 = (9, 0)
BASE = Configuration("glm-5.2", 2, 1, 2, "bfloat16", "ag_rs", 0, "none", "reference")

factors = st.dictionaries(
    st.sampled_from("abcdef"), st.integers(1, 4).map(range), min_size=2, max_size=5
)
configurations = st.builds(
    Configuration,
    model=st.sampled_from(["glm-5.2", "deepseek-v3.2", "/a/m", "/b/m"]),
    tp=st.sampled_from([1, 2, 4]),
    pcp=st.sampled_from([1, 2]),
    dcp=st.sampled_from([1, 2, 4]),
    kv_cache_dtype=st.sampled_from(["auto", "bfloat16", "fp8_e4m3"]),
    comm=st.sampled_from(["ag_rs", "a2a"]),
    mtp=st.integers(0, 3),
    graphs=st.sampled_from(GRAPHS),
    kernel=st.just("auto"),
    force_mqa=st.booleans(),
)


def pairs(row):
    return set(itertools.combinations(row.items(), 2))


@settings(max_examples=50)
@given(factors)
def test_pairwise_meets_every_pair_with_no_idle_row(given_factors):
    rows = pairwise(given_factors)
    names = list(given_factors)
    wanted = {
        ((one, x), (two, y))
        for one, two in itertools.combinations(names, 2)
        for x in given_factors[one]
        for y in given_factors[two]
    }
    met = [pairs(row) for row in rows]
    assert set().union(*met) == wanted
    for number, row in enumerate(met):
        assert row - set().union(*met[:number]), "each row brings a new pair"
    assert len(rows) <= len(list(itertools.product(*given_factors.values())))
    assert rows == pairwise(given_factors)


def test_the_cover_has_at_most_16_engines_and_every_pair():
    made = cover("reference")
    assert len(made) <= 16
    assert len({c.name for c in made}) == len(made)
    met = set()
    for c in made:
        assert (c.pcp, c.kernel, c.force_mqa) == (1, "reference", True)
        sizes = (c.tp, c.dcp)
        met |= pairs(
            {
                "sizes": sizes,
                "kv_cache_dtype": c.kv_cache_dtype,
                "model": c.model,
                "graphs": c.graphs,
                "mtp": c.mtp,
                "comm": c.comm,
            }
        )
    wanted = {
        ((one, x), (two, y))
        for one, two in itertools.combinations(COVER, 2)
        for x in COVER[one]
        for y in COVER[two]
    }
    assert met == wanted


def test_the_cover_shares_its_baselines():
    """Two models with two cache types each, on one and on two ranks."""
    made = cover("reference")
    engines = with_baselines(made)
    assert len(engines) == len(made) + 2 * 2 * 2
    assert [e.dcp for e in engines[:8]] == [1] * 8, "baselines come first"


@given(st.lists(configurations, min_size=1, max_size=6))
def test_engines_of_one_name_are_one_engine(chosen):
    """Whatever differs between two engines is in the name."""
    engines = with_baselines(chosen)
    assert len({e.name for e in engines}) == len(engines)
    assert {c.name for c in chosen} <= {e.name for e in engines}
    specs = {}
    for one in (*chosen, *(c.baseline(tp) for c in chosen for tp in (1, 2))):
        spec = engine_of(one, Path(one.model), LIMITS, None, H200)
        if one.dcp == 1:
            spec = spec.model_copy(update={"comm": None})  # vLLM is not told it
        assert specs.setdefault(one.name, spec) == spec


def test_dcp_one_is_its_own_baseline_whatever_the_exchange():
    plain = Configuration("glm-5.2", 2, 1, 1, "auto", "a2a", 0, "none", "auto")
    assert [e.name for e in with_baselines([plain])] == ["glm-5.2_tp1_auto", "glm-5.2_tp2_auto"]


def test_a_baseline_keeps_model_cache_kernel_and_prefill():
    one = Configuration("/m", 4, 2, 4, "fp8_e4m3", "a2a", 2, "full", "reference", False)
    base = one.baseline(2)
    assert (base.tp, base.pcp, base.dcp, base.world) == (2, 1, 1, 2)
    assert (base.mtp, base.graphs, base.comm) == (0, "none", "ag_rs")
    assert (base.model, base.kv_cache_dtype) == ("/m", "fp8_e4m3")
    assert (base.kernel, base.force_mqa) == ("reference", False)


def test_a_name_tells_the_configuration():
    assert BASE.name == "glm-5.2_tp2-dcp2_bfloat16_ag_rs"
    full = Configuration("glm-5.2", 2, 4, 8, "auto", "a2a", 3, "full", "auto", False)
    assert full.name == "glm-5.2_tp2-pcp4-dcp8_auto_a2a_full_mtp3_dense-prefill"


@pytest.mark.parametrize(
    "folder",
    [
        "my model",
        "a/b/c/",
        "..",
        ".",
        "/",
        "[red]x[/red]",
        "new\nline",
        "café",
        "x" * 255,
        "$(id);`id`",
        "-v",
        "under_score",
        b"caf\xe9".decode(errors="surrogateescape"),
    ],
)
def test_a_name_is_a_file_name(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = Configuration(folder, 4, 2, 8, "fp8_e4m3", "ag_rs", 8, "piecewise", "auto", False)
    assert re.fullmatch(r"[A-Za-z0-9._-]+", made.name)
    assert len(made.name) <= 120
    (tmp_path / made.name).mkdir()
    assert (tmp_path / made.name).parent == tmp_path


def test_folders_of_one_basename_differ_and_a_trailing_slash_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "m").mkdir(parents=True)
    names = [
        Configuration(folder, 2, 1, 2, "auto", "ag_rs", 0, "none", "auto").name
        for folder in ("a/m", "a/m/", "./a/m", str(tmp_path / "a" / "m"), "b/m", "a/glm-5.2")
    ]
    assert len(set(names[:4])) == 1
    assert len(set(names)) == 3
    assert names[5] != BASE.name


def test_the_reference_kernel_runs_our_class_without_dcp_too():
    for one in (BASE, BASE.baseline(1)):
        assert engine_of(one, Path("/m"), LIMITS, None, H200).backend == ALIAS
    assert engine_of(replace(BASE, kernel="auto"), Path("/m"), LIMITS, None, H200).backend is None


def test_only_engines_under_dcp_are_strict():
    assert engine_of(BASE, Path("/m"), LIMITS, None, H200).strict
    assert not engine_of(BASE.baseline(2), Path("/m"), LIMITS, None, H200).strict


def test_ranks_that_share_a_gpu_get_a_cache_of_a_known_size():
    alone, shared = (engine_of(BASE, Path("/m"), LIMITS, size, H200) for size in (None, 1 << 31))
    assert (alone.shared, alone.kv_cache_bytes) == (False, None)
    assert (shared.shared, shared.kv_cache_bytes) == (True, 1 << 31)
    assert shared.utilization < 0.1 < alone.utilization < 1


@pytest.mark.parametrize(
    ("kv_cache_dtype", "dcp", "kernel", "expected"),
    [
        ("fp8_e4m3", 1, "auto", True),
        ("fp8", 1, "auto", True),
        ("fp8_e4m3", 2, "auto", False),
        ("fp8_e4m3", 1, "reference", False),
        ("bfloat16", 1, "auto", False),
        ("fp8_ds_mla", 1, "auto", False),
    ],
)
def test_stocks_fp8_class_on_hopper_wants_the_whole_gpu(kv_cache_dtype, dcp, kernel, expected):
    one = replace(BASE, kv_cache_dtype=kv_cache_dtype, dcp=dcp, kernel=kernel)
    assert engine_of(one, Path("/m"), LIMITS, 1 << 31, H200).whole_gpu is expected
    assert not engine_of(one, Path("/m"), LIMITS, 1 << 31, (10, 0)).whole_gpu
