"""Registration, each case in a process of its own as vLLM's processes are."""

import subprocess
import sys

import pytest

from release_marks import RELEASE, takes_new_names
from vllm_dcp_mla.plugin import ALIAS_PATH, alias, overrides

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture
def run(vllm_process):
    return vllm_process.run


def changed(report):
    return {n: p for n, p in report["after"].items() if report["before"].get(n) != p}


def test_load_registers_ours_and_touches_nothing_else(run):
    report = run(
        """
        import sys
        heavy = ("torch._inductor", "flashinfer", "vllm.v1.attention.backends.mla")
        loaded = set(sys.modules)
        import vllm_dcp_mla.plugin
        vllm_dcp_mla.plugin.register()
        new = [m for m in set(sys.modules) - loaded if m.startswith(heavy)]
        vllm_dcp_mla.plugin.register()
        load_general_plugins()
        import vllm.envs as envs
        report(new=new, env=[e for e in envs.environment_variables if "DCP_MLA" in e])
        """
    )
    members = overrides()
    assert {"FLASHINFER_MLA_SPARSE", "FLASHMLA_SPARSE"} <= set(members)
    assert changed(report) == {**members, alias(): ALIAS_PATH}
    assert report["new"] == []
    said = [message for level, message in report["log"] if level == "INFO"]
    assert len(said) == len(report["log"]) == (2 if RELEASE.masks_no_sequences else 1)
    assert said[0].endswith(f": {', '.join((*members, alias()))}.")
    for message in said[1:]:
        assert f"Left to vLLM {RELEASE.series}, which does it itself: the eager mask" in message
    assert "VLLM_DCP_MLA_KERNEL" in report["env"]


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"VLLM_DCP_MLA_DISABLE": "1"}, "VLLM_DCP_MLA_DISABLE is set"),
        ({"VLLM_DCP_MLA_KERNEL": "fast"}, "VLLM_DCP_MLA_KERNEL is 'fast'"),
    ],
)
def test_off_means_untouched_and_one_line(run, env, said):
    report = run("load_general_plugins(); report()", **env)
    assert changed(report) == {}
    assert len(report["log"]) == 1
    assert said in report["log"][0][1]


def test_left_out_by_vllm_plugins(run):
    report = run("load_general_plugins(); report()", VLLM_PLUGINS="other")
    assert changed(report) == {}
    assert report["log"] == []


def test_a_member_of_another_plugin_is_left_alone_loudly(run):
    report = run(
        """
        register_backend(E.FLASHINFER_MLA_SPARSE, "other.plugin.Backend")
        load_general_plugins(); report()
        """
    )
    assert changed(report)["FLASHINFER_MLA_SPARSE"] == "other.plugin.Backend"
    assert changed(report)["FLASHMLA_SPARSE"].startswith("vllm_dcp_mla.")
    level, message = report["log"][0]
    assert level == "WARNING"
    assert "other.plugin.Backend" in message


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ("installed.installed_version = lambda name: '0.34.0'", "outside the tested range"),
        ("installed.installed_version = lambda name: '0.28.1'", "outside the tested range"),
        ("installed.installed_version = lambda name: 'dev'", "outside the tested range"),
        ("installed.installed_version = lambda name: None", "not installed as a distribution"),
        (
            "symbols.SYMBOLS += (symbols.Symbol('vllm/envs.py', 'gone_tomorrow'),)",
            "vllm.envs.gone_tomorrow is gone",
        ),
    ],
)
def test_a_vllm_that_differs_switches_everything_off(run, patch, said):
    report = run(
        f"""
        from vllm_dcp_mla.compat import installed, symbols
        {patch}
        load_general_plugins(); report()
        """
    )
    assert changed(report) == {}
    assert [level for level, _ in report["log"]] == ["WARNING"]
    assert said in report["log"][0][1]


def test_an_untested_vllm_can_be_tried(run):
    report = run(
        """
        from vllm_dcp_mla.compat import versions
        versions.is_tested = lambda version: False
        load_general_plugins(); report()
        """,
        VLLM_DCP_MLA_ALLOW_UNTESTED="1",
    )
    assert "FLASHINFER_MLA_SPARSE" in changed(report)


def test_an_untested_vllm_that_lacks_something_is_not_tried(run):
    report = run(
        """
        from vllm_dcp_mla.compat import symbols, versions
        versions.is_tested = lambda version: False
        symbols.SYMBOLS += (symbols.Symbol('vllm/envs.py', 'gone_tomorrow'),)
        load_general_plugins(); report()
        """,
        VLLM_DCP_MLA_ALLOW_UNTESTED="1",
    )
    assert changed(report) == {}
    ((level, message),) = report["log"]
    assert level == "WARNING"
    assert "vllm.envs.gone_tomorrow is gone" in message


@pytest.mark.skipif(RELEASE.takes_new_names, reason="CUSTOM is used by older releases only")
def test_custom_of_another_plugin_is_left_alone_loudly(run):
    report = run(
        """
        register_backend(E.CUSTOM, "other.plugin.Backend")
        load_general_plugins(); report()
        """
    )
    assert report["after"]["CUSTOM"] == "other.plugin.Backend"
    assert "FLASHINFER_MLA_SPARSE" in changed(report)
    level, message = report["log"][0]
    assert level == "WARNING"
    assert message.startswith("CUSTOM is already overridden by other.plugin.Backend")


@takes_new_names
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_the_alias_survives_pickling_into_a_child(run, method, tmp_path):
    # A spawned child imports the parent's main module, so the child's part lives in a file.
    child = tmp_path / "child_of_test.py"
    child.write_text(
        "def work(config, queue):\n"
        "    member = config['backend']\n"
        "    from vllm.plugins import load_general_plugins\n"
        "    load_general_plugins()\n"
        "    from vllm.v1.attention.backends.registry import AttentionBackendEnum as E\n"
        "    queue.put((member.name, member is E['DCP_MLA_SPARSE'], member.get_path(),\n"
        "               E.FLASHINFER_MLA_SPARSE.get_path(),\n"
        "               E.FLASHINFER_MLA_SPARSE is E(E.FLASHINFER_MLA_SPARSE.value)))\n"
    )
    report = run(
        f"""
        import sys, multiprocessing, copy, pickle
        sys.path.insert(0, {str(tmp_path)!r})
        import child_of_test
        load_general_plugins()
        member = E["DCP_MLA_SPARSE"]
        assert pickle.loads(pickle.dumps(member)) is member and copy.deepcopy(member) is member
        context = multiprocessing.get_context({method!r})
        queue = context.Queue()
        process = context.Process(target=child_of_test.work, args=({{"backend": member}}, queue))
        process.start()
        got = queue.get(timeout=200)
        process.join()
        report(child=got, exitcode=process.exitcode)
        """,
        PYTHONPATH=str(tmp_path),
    )
    assert report["exitcode"] == 0
    name, same, path, overridden, stock_value_unmoved = report["child"]
    assert (name, same, stock_value_unmoved) == ("DCP_MLA_SPARSE", True, True)
    assert path == "vllm_dcp_mla.backends.members.DcpMlaSparse"
    assert overridden == "vllm_dcp_mla.backends.members.FlashInferMLASparse"


def test_importing_the_entry_point_is_light():
    code = (
        "import sys, vllm_dcp_mla, vllm_dcp_mla.plugin; "
        "print([m for m in ('torch', 'vllm', 'pydantic', 'typer', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
