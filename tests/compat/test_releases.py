"""The table of releases, and what follows from it; needs neither torch nor vLLM."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from vllm_dcp_mla.compat import releases, upstream
from vllm_dcp_mla.compat.releases import NEWEST, RELEASES, release_of
from vllm_dcp_mla.compat.versions import TESTED, is_tested
from vllm_dcp_mla.plugin import ALIAS, OVERRIDES, alias, overrides


@pytest.mark.parametrize(
    ("version", "series"),
    [
        ("0.29.0", "0.29"),
        ("0.31.2+cu130", "0.31"),
        ("0.33.1rc1.dev5+g12ab", "0.33"),
        ("0.28.1", "0.29"),
        ("0.34.0", "0.33"),
        ("1.0.0", "0.33"),
        ("dev", "0.33"),
        (None, "0.33"),
    ],
)
def test_a_version_has_the_nearest_series(version, series):
    assert release_of(version).series == series


def test_the_tested_range_is_the_tables():
    assert [r.minor for r in RELEASES] == list(range(29, 34))
    for release in RELEASES:
        assert is_tested(f"{release.series}.0")
        assert is_tested(f"{release.series}.1rc1")
    assert not is_tested("0.28.9")
    assert not is_tested("0.34.0")
    assert str(TESTED) in ("<0.34,>=0.29.0", ">=0.29.0,<0.34")


def test_what_stock_can_it_keeps():
    """The table reads as a history: an ability that came stays."""
    for name in (f.name for f in fields(NEWEST) if f.type == "bool"):
        had = [getattr(release, name) for release in RELEASES]
        assert had == sorted(had), name
        assert had[-1], name


def test_the_package_asks_for_every_column():
    package = Path(releases.__file__).parents[1]
    code = "\n".join(path.read_text() for path in package.rglob("*.py"))
    unused = [f.name for f in fields(NEWEST) if not re.search(rf"\.{f.name}\b", code)]
    assert unused == []


@pytest.mark.parametrize("release", RELEASES, ids=lambda r: r.series)
def test_members_and_alias_by_release(monkeypatch, release):
    monkeypatch.setattr(releases, "installed_version", lambda name: f"{release.series}.0")
    assert alias() == ("CUSTOM" if release.minor < 32 else ALIAS)
    assert overrides() == {n: p for n, p in OVERRIDES.items() if n not in release.left_to_stock}
    assert release.left_to_stock <= set(OVERRIDES)


def test_what_is_left_to_stock_is_what_the_table_has():
    for release in RELEASES:
        left = " ".join(upstream.left_to_stock(release))
        assert ("eager mask" in left) is release.masks_no_sequences
