"""Kernels go by the names that the setting takes, and by no others."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest

from release_marks import serves_hopper
from vllm_dcp_mla.capability import TABLE
from vllm_dcp_mla.settings import KernelChoice, KernelName, Settings

NAMES = get_args(KernelName)
HOPPERS = ("flashmla", "flash_attn3", "triton_decode")
KERNELS = Path(__file__).parents[2] / "src/vllm_dcp_mla/kernels"


def names_of(path):
    """Each class of a file that has a kernel's name, with it; the protocol has none."""
    return {
        made.name: ast.literal_eval(line.value)
        for made in ast.parse(path.read_text()).body
        if isinstance(made, ast.ClassDef)
        for line in made.body
        if isinstance(line, ast.AnnAssign) and line.value and ast.unparse(line.target) == "name"
    }


def test_each_kernel_is_named_as_its_module_and_the_setting_takes_the_name():
    by_module = {path.stem: names for path in KERNELS.glob("*.py") if (names := names_of(path))}
    assert {module: list(names.values()) for module, names in by_module.items()} == {
        name: [name] for name in NAMES
    }
    assert get_args(KernelChoice) == ("auto", *NAMES)
    assert {name for row in TABLE for name in row.kernels} == set(NAMES)


def test_the_setting_s_description_names_each():
    said = Settings.model_fields["kernel"].description
    assert [name for name in NAMES if f"`{name}`" not in said] == []


@pytest.mark.vllm
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=serves_hopper if name in HOPPERS else ()) for name in NAMES]
)
def test_each_name_loads_its_class(monkeypatch, cpu_vllm, name):
    from vllm_dcp_mla.kernels import load_kernel

    (cls,) = names_of(KERNELS / f"{name}.py")
    made = getattr(import_module(f"vllm_dcp_mla.kernels.{name}"), cls)
    monkeypatch.setattr(made, "__init__", lambda self, *args: None)  # which needs its GPU
    assert type(load_kernel(name)) is made


def test_the_names_need_neither_torch_nor_vllm():
    code = (
        "import sys\nfor name in ('torch', 'vllm'): sys.modules[name] = None\n"
        "import vllm_dcp_mla.settings, vllm_dcp_mla.capability"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_no_kernel_is_refused_with_all_that_are():
    pytest.importorskip("torch")
    from vllm_dcp_mla.kernels import load_kernel

    with pytest.raises(ValueError, match=f"kernel is 'auto'; known: {', '.join(NAMES)}$"):
        load_kernel("auto")
