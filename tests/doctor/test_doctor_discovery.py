import os
import sys

import pytest

from vllm_dcp_mla.doctor.discovery import (
    ENTRY_POINT_VALUE,
    check_allowed,
    check_discovered,
    check_members,
    check_settings,
    members,
)
from vllm_dcp_mla.doctor.processes import Probed, run_probe
from vllm_dcp_mla.plugin import ALIAS_PATH, alias, overrides

OURS = {"name": "dcp_mla", "value": ENTRY_POINT_VALUE}
PATHS = {**overrides(), alias(): ALIAS_PATH}


def metadata(entry_points=(OURS,), distributions=None, imported_from="/site/vllm_dcp_mla"):
    if distributions is None:
        distributions = [distribution("/site/vllm_dcp_mla-1.dist-info")]
    content = {
        "entry_points": list(entry_points),
        "distributions": distributions,
        "imported_from": imported_from,
    }
    return Probed({"metadata": content})


def distribution(path, folder="/site/vllm_dcp_mla"):
    return {"metadata": path, "version": "1", "folder": folder}


def registry(**changed):
    members = {name: {"path": path, "overridden": True} for name, path in PATHS.items()}
    return Probed({"registry": {"members": {**members, **changed}}})


def test_a_clean_installation_passes():
    assert [c.status for c in check_discovered(metadata())] == ["pass", "pass"]


@pytest.mark.parametrize(
    ("probed", "statuses"),
    [
        (metadata(entry_points=[]), ["fail", "pass"]),
        (metadata(entry_points=[{"name": "dcp_mla", "value": "other:f"}]), ["fail", "pass"]),
        (
            metadata(entry_points=[OURS, {"name": "dcp_mla", "value": "other:f"}]),
            ["warn", "pass"],
        ),
        (metadata(distributions=[]), ["pass", "fail"]),
        (metadata(imported_from="/checkout/src/vllm_dcp_mla"), ["pass", "warn"]),
        (metadata(imported_from=None), ["pass", "warn"]),
        (metadata(imported_from="/site/vllm_dcp_mla_two"), ["pass", "warn"]),
        (Probed({}, "exit status 1: no encodings"), ["fail"]),
    ],
)
def test_what_is_wrong_has_a_fix(probed, statuses):
    checks = check_discovered(probed)
    assert [c.status for c in checks] == statuses
    assert all(bool(c.fix) == (c.status != "pass") for c in checks)


def test_an_editable_installation_may_lie_below_its_folder():
    where = "/checkout/src/vllm_dcp_mla"
    probed = metadata(
        distributions=[distribution("/site/x.dist-info", "/checkout")], imported_from=where
    )
    assert check_discovered(probed)[1].status == "pass"


def test_two_distributions_are_listed_and_an_egg_info_is_called_stale():
    two = ["/site/vllm_dcp_mla-1.dist-info", "/checkout/src/vllm_dcp_mla.egg-info"]
    (_, check) = check_discovered(metadata(distributions=[distribution(p) for p in two]))
    assert check.status == "warn"
    assert all(path in check.found for path in two)
    assert two[1] in check.fix
    assert two[0] not in check.fix


def test_one_distribution_on_two_paths_is_one():
    one = distribution("/site/vllm_dcp_mla-1.dist-info")
    assert check_discovered(metadata(distributions=[one, dict(one)]))[1].status == "pass"


@pytest.mark.parametrize(
    ("environ", "status", "fix"),
    [
        ({}, "pass", ""),
        ({"VLLM_PLUGINS": "dcp_mla"}, "pass", ""),
        ({"VLLM_PLUGINS": "lora,dcp_mla"}, "pass", ""),
        ({"VLLM_PLUGINS": ""}, "fail", "unset it, or VLLM_PLUGINS=dcp_mla"),
        ({"VLLM_PLUGINS": "lora"}, "fail", "VLLM_PLUGINS=lora,dcp_mla"),
        ({"VLLM_PLUGINS": "lora, dcp_mla"}, "fail", "VLLM_PLUGINS=lora,dcp_mla"),
        ({"VLLM_PLUGINS": "DCP_MLA"}, "fail", "VLLM_PLUGINS=DCP_MLA,dcp_mla"),
    ],
)
def test_vllm_plugins_is_read_as_vllm_reads_it(environ, status, fix):
    check = check_allowed(environ)
    assert check.status == status
    assert check.fix.endswith(fix)


@pytest.mark.parametrize(
    ("environ", "status"),
    [
        ({}, "pass"),
        ({"VLLM_DCP_MLA_SLAB_LIMIT_BYTES": "1048576"}, "pass"),
        ({"VLLM_DCP_MLA_DISABLE": "1"}, "warn"),
        ({"VLLM_DCP_MLA_DISABLE": "0"}, "pass"),
        ({"VLLM_DCP_MLA_DISABLE": "perhaps"}, "fail"),
        ({"VLLM_DCP_MLA_KERNEL": "fast"}, "fail"),
        ({"VLLM_DCP_MLA_SLAB_LIMIT": "5"}, "warn"),
        ({"VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE": "2GiB"}, "fail"),
    ],
)
def test_settings_are_checked(environ, status):
    check = check_settings(environ)
    assert check.status == status
    assert all(name in check.found for name, value in environ.items() if value != "0" or status)


def test_a_misspelt_setting_is_named_with_the_one_it_is_like():
    check = check_settings({"VLLM_DCP_MLA_SLAB_LIMIT": "5"})
    assert check.fix == "unset VLLM_DCP_MLA_SLAB_LIMIT; did you mean VLLM_DCP_MLA_SLAB_LIMIT_BYTES?"
    assert check_settings({"VLLM_DCP_MLA_TYPO": "5"}).fix == "unset VLLM_DCP_MLA_TYPO"
    # It is no reason for a backend to be stock's.
    (member, *_) = check_members(registry(**{}), {"VLLM_DCP_MLA_SLAB_LIMIT": "5"})
    assert member.status == "pass"


def test_members_of_ours_pass():
    checks = check_members(registry(), {})
    assert [c.name for c in checks] == [f"backend {name}" for name in members()]
    assert {c.status for c in checks} == {"pass"}


def test_a_member_of_another_plugin_is_named():
    other = {"path": "other.Backend", "overridden": True}
    checks = check_members(registry(FLASHMLA_SPARSE=other), {})
    (check,) = (c for c in checks if c.name == "backend FLASHMLA_SPARSE")
    assert (check.status, "other.Backend" in check.found) == ("fail", True)


def test_a_stock_member_fails_unless_the_plugin_is_switched_off():
    stock = {"path": "vllm.Backend", "overridden": False}
    probed = registry(FLASHINFER_MLA_SPARSE=stock)
    assert check_members(probed, {})[0].status == "fail"
    check = check_members(probed, {"VLLM_DCP_MLA_DISABLE": "1"})[0]
    assert (check.status, check.found) == ("warn", "stock: vllm.Backend")


def test_a_member_that_is_not_registered_fails():
    probed = registry()
    del probed.sections["registry"]["members"][alias()]
    assert check_members(probed, {})[-1].status == "fail"


def test_a_vllm_that_does_not_load_is_one_failure():
    (check,) = check_members(Probed({}, "exit status 1: OSError: libtorch.so"), {})
    assert check.status == "fail"


def environment(*paths):
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}


def egg_info(folder):
    egg = folder / "vllm_dcp_mla.egg-info"
    egg.mkdir()
    (egg / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: vllm_dcp_mla\nVersion: 0.0.1\n")
    (folder / "vllm_dcp_mla").mkdir()
    (folder / "vllm_dcp_mla" / "__init__.py").write_text("")
    return folder


def test_a_stale_egg_info_on_the_path_hides_the_entry_point(tmp_path):
    probed = run_probe("metadata", environ=environment(egg_info(tmp_path)))
    discovered, installation = check_discovered(probed)
    assert probed.sections["metadata"]["imported_from"] == str(tmp_path / "vllm_dcp_mla")
    assert installation.status in ("warn", "fail")
    assert str(tmp_path) in installation.found
    assert discovered.status == "fail"


def test_the_current_folder_does_not_count(tmp_path, monkeypatch):
    monkeypatch.chdir(egg_info(tmp_path))
    probed = run_probe("metadata")
    assert str(tmp_path) not in str(probed.sections["metadata"])


def test_what_ends_a_probe_is_told(tmp_path):
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch is broken')")
    probed = run_probe("runtime", environ=environment(tmp_path))
    assert probed.sections == {}
    assert probed.error == "exit status 1: RuntimeError: torch is broken"


def test_the_folder_of_the_probe_does_not_count(tmp_path):
    (tmp_path / "torch.py").write_text("import sys; raise RuntimeError(sys.path)")
    probed = run_probe("runtime", environ=environment(tmp_path))
    assert "site-packages" in probed.error
    assert "doctor" not in probed.error


def test_sections_before_the_break_count(tmp_path):
    (tmp_path / "torch.py").write_text(
        "class version: cuda = '1.2'\nclass cuda: is_available = staticmethod(lambda: False)\n"
    )
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise OSError('vllm is broken')")
    probed = run_probe("runtime", members(), environment(tmp_path))
    assert probed.sections == {"torch": {"cuda_build": "1.2", "cuda_available": False}}
    assert probed.error == "exit status 1: OSError: vllm is broken"


def test_a_python_that_cannot_start_is_told(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert "/no/such/python" in run_probe("metadata").error
