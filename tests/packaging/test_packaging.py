"""The wheel and the sdist: what is in them, and that the wheel works without vLLM and torch."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from vllm_dcp_mla import __version__, plan_workspace
from vllm_dcp_mla.compat.versions import TESTED
from vllm_dcp_mla.doctor.versions import MIN_CUDA_PYTHON

pytest.importorskip("hatchling", reason="needs hatchling, of the dev group")

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "vllm_dcp_mla"


def build(source, target, *kinds):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(target), *kinds],
        cwd=source,
        check=True,
        capture_output=True,
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder)
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def metadata(built):
    with zipfile.ZipFile(built[0]) as wheel:
        return wheel.read(f"vllm_dcp_mla-{__version__}.dist-info/METADATA").decode()


def source_files():
    return {
        str(path.relative_to(ROOT / "src"))
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_the_package_and_nothing_else(built):
    wheel, _ = built
    assert wheel.name == f"vllm_dcp_mla-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = f"vllm_dcp_mla-{__version__}.dist-info/"
    assert {n for n in names if not n.startswith(info)} == source_files()
    assert {n.removeprefix(info) for n in names if n.startswith(info)} == {
        *("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"),
    }
    assert {
        "vllm_dcp_mla/py.typed",
        "vllm_dcp_mla/models/glm-5.2.json",
        "vllm_dcp_mla/models/deepseek-v3.2.json",
    } <= names


def test_the_sdist_builds_the_same_wheel(built, tmp_path):
    wheel, sdist = built
    shutil.unpack_archive(sdist, tmp_path)
    (source,) = tmp_path.iterdir()
    inside = {str(p.relative_to(source)) for p in source.rglob("*") if p.is_file()}
    assert {
        *("README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "tests/run.sh"),
        *("examples/setup.sh", "examples/demo.sh", "src/vllm_dcp_mla/py.typed"),
    } <= inside
    assert not [name for name in inside if name.endswith(".pyc")]
    build(source, tmp_path / "again", "-t", "wheel")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(tmp_path / "again" / wheel.name) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())
        for name in one.namelist():
            assert one.read(name) == other.read(name), name


def test_the_metadata_says_what_the_project_is(metadata):
    head, _, readme = metadata.partition("\n\n")
    assert "License-Expression: Apache-2.0" in head
    assert "License-File: LICENSE" in head
    assert "Requires-Python: <3.14,>=3.11" in head
    assert readme == (ROOT / "README.md").read_text()
    required = re.findall(r"^Requires-Dist: (\S+?)[<>=~]", head, re.MULTILINE)
    assert not {"torch", "triton", "flashinfer-python"} & set(required)
    extra = [
        Requirement(line)
        for line in re.findall(r"^Requires-Dist: (.*)", head, re.MULTILINE)
        if "extra == 'vllm'" in line
    ]
    assert {r.name: (str(r.marker), r.specifier) for r in extra} == {
        "vllm": ('extra == "vllm"', TESTED),
        "cuda-python": ('extra == "vllm"', SpecifierSet(f">={MIN_CUDA_PYTHON}")),
    }


def test_an_index_would_take_them(built):
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *map(str, built)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_changelog_is_of_this_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d", headings[1])
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def closure(requirements, extras=frozenset()):
    """Installed distributions that requirements lead to, themselves included."""
    found, todo = {}, [(Requirement(r), extras) for r in requirements]
    while todo:
        requirement, outer = todo.pop()
        applies = requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in outer or {""}
        )
        if not applies:
            continue
        key = (requirement.name.lower(), frozenset(requirement.extras))
        if key in found:
            continue
        try:
            found[key] = distribution(requirement.name)
        except PackageNotFoundError:  # an optional or platform requirement
            continue
        for child in found[key].requires or []:
            todo.append((Requirement(child), requirement.extras))
    return {name: dist for (name, _), dist in found.items()}


@pytest.mark.vllm
def test_beside_vllm_nothing_has_to_be_installed(metadata):
    ours = {
        Requirement(line).name
        for line in re.findall(r"^Requires-Dist: (.*)", metadata, re.MULTILINE)
        if "extra ==" not in line
    }
    assert ours == {"packaging", "pydantic", "rich", "typer"}
    assert ours <= set(closure(["vllm"]))


@pytest.fixture(scope="module")
def installed(built, metadata, tmp_path_factory):
    """An environment with the wheel and what its metadata asks for; made without a network."""
    folder = tmp_path_factory.mktemp("wheel") / "venv"
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(built[0])], check=True, capture_output=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for dist in closure(re.findall(r"^Requires-Dist: (.*)", metadata, re.MULTILINE)).values():
        for file in dist.files or []:
            source = Path(dist.locate_file(file))
            if ".." not in file.parts and source.is_file():
                target = site / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
    return folder / "bin"


def run(*command, **environ):
    return subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, **environ},
    )


@pytest.mark.slow
def test_the_wheel_works_without_vllm_and_torch(installed):
    found = run(
        installed / "python",
        "-c",
        "from importlib.util import find_spec as f; print([f('vllm'), f('torch')])",
    )
    assert found.stdout.strip() == "[None, None]", found.stderr
    command = installed / "vllm-dcp-mla"
    assert run(command, "--version").stdout == f"vllm-dcp-mla {__version__}\n"
    shown = run(command, "--help")
    assert shown.returncode == 0, shown.stderr
    for name in ("doctor", "plan", "selftest"):
        assert name in shown.stdout
    plan = run(command, "plan", "--json")
    assert plan.returncode == 0, plan.stderr
    total = json.loads(plan.stdout)["workspace"]["total_bytes"]
    assert total == plan_workspace(64, 8192).total_bytes == 951_058_432
    doctor = run(command, "doctor", "--json")
    assert doctor.returncode == 1, doctor.stderr
    failed = {c["name"] for c in json.loads(doctor.stdout)["checks"] if c["status"] == "fail"}
    assert "vllm" in failed
    selftest = run(command, "selftest")
    assert selftest.returncode == 1
    assert "run pip install 'vllm-dcp-mla[vllm]'" in selftest.stderr


@pytest.mark.slow
def test_doctor_sees_another_copy_in_front_of_the_wheel(installed, tmp_path):
    """PYTHONPATH=src, alone and with what an old build left beside it."""
    command = installed / "vllm-dcp-mla"

    def installation(path):
        said = run(command, "doctor", "--json", "--no-selection", PYTHONPATH=str(path))
        (check,) = (c for c in json.loads(said.stdout)["checks"] if c["name"] == "one installation")
        return check

    assert run(command, "doctor", "--json", "--no-selection").stdout.count('"pass"') > 3
    check = installation(ROOT / "src")
    assert (check["status"], check["fix"].startswith("unset PYTHONPATH")) == ("warn", True)
    shutil.copytree(PACKAGE, tmp_path / "vllm_dcp_mla")
    (tmp_path / "vllm_dcp_mla.egg-info").mkdir()
    info = "Metadata-Version: 2.1\nName: vllm-dcp-mla\nVersion: 0.0.1\n"
    (tmp_path / "vllm_dcp_mla.egg-info" / "PKG-INFO").write_text(info)
    check = installation(tmp_path)
    assert check["status"] == "warn"
    assert "remove the stale" in check["fix"]


#: Run by each Python in an environment with the wheel and its requirements alone.
ON_ITS_OWN = """
from importlib.util import find_spec
assert not find_spec("vllm") and not find_spec("torch")
from vllm_dcp_mla import check_topology, gathered_heads, local_seq_lens, plan_workspace
assert check_topology(8, 1, 8, 64) == [] and check_topology(8, 1, 3, 64)
assert gathered_heads(8, 8, 1, 8) == 64
assert local_seq_lens(5, 2) == [3, 2]
assert plan_workspace(64, 16384).total_bytes == 951_058_432
"""


def pythons(version):
    """Where an interpreter of a version may be; a shim may be there without one behind it."""
    yield from filter(None, [shutil.which(f"python{version}")])
    yield from Path.home().glob(f".pyenv/versions/{version}.*/bin/python")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_every_python_without_vllm(built, tmp_path, version):
    """Pure functions, ``plan`` and ``--help``; what else there is says what to install."""
    uv = shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None:
        pytest.skip("no uv in this environment; examples/setup.sh installs it")
    python = next((p for p in pythons(version) if not run(p, "-c", "").returncode), None)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    environment = tmp_path / "venv"
    assert run(uv, "venv", "--python", python, environment).returncode == 0
    mine = environment / "bin" / "python"
    done = run(uv, "pip", "install", "--quiet", "--python", mine, built[0])
    assert done.returncode == 0, done.stderr
    done = run(mine, "-c", ON_ITS_OWN)
    assert done.returncode == 0, done.stderr
    command = mine.with_name("vllm-dcp-mla")
    for arguments in (["--help"], ["plan"], ["plan", "--help"], ["selftest", "--help"]):
        done = run(command, *arguments)
        assert done.returncode == 0, done.stderr
    for name in ("doctor", "selftest"):
        done = run(command, name)
        assert done.returncode == 1
        assert "pip install 'vllm-dcp-mla[vllm]'" in " ".join((done.stdout + done.stderr).split())


@pytest.mark.slow
def test_the_entry_point_of_the_wheel_resolves(installed):
    done = run(
        installed / "python",
        "-c",
        "from importlib.metadata import entry_points\n"
        "(found,) = entry_points(group='vllm.general_plugins', name='dcp_mla')\n"
        "found.load()()\n"
        "print(found.value, found.load().__code__.co_filename)",
    )
    assert done.returncode == 0, done.stderr
    value, path = done.stdout.split()
    assert value == "vllm_dcp_mla.plugin:register"
    assert Path(path).is_relative_to(installed.parent)
    assert "vLLM is not installed" in done.stderr
