"""The list of coupled symbols is complete, and a difference is noticed."""

import ast
from pathlib import Path

import pytest

import vllm_dcp_mla
from vllm_dcp_mla.compat import flashinfer, symbols

PACKAGE = Path(vllm_dcp_mla.__file__).parent
#: What runs inside an engine; the rest of the package only looks at vLLM from outside.
ENGINE = (
    "plugin.py",
    "device_buffer.py",
    "settings.py",
    "backends",
    "compat",
    "indexer",
    "kernels",
)


def imported_names():
    for top in ENGINE:
        path = PACKAGE / top
        for file in [path] if path.suffix else sorted(path.glob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
                    for alias in node.names:
                        yield file.name, node.module, alias.name


def test_every_import_from_vllm_is_listed():
    listed = {str(symbol) for symbol in symbols.SYMBOLS}
    known = {
        ".".join(name.split(".")[:n]) for name in listed for n in range(1, name.count(".") + 2)
    }
    # Packages that re-export the engine's configuration, and names that are Triton's own.
    elsewhere = ("vllm.triton_utils", "vllm.config")
    missing = [
        f"{file}: {module}.{name}"
        for file, module, name in imported_names()
        if f"{module}.{name}" not in known and module not in elsewhere
    ]
    assert missing == []


@pytest.fixture
def installation(tmp_path, monkeypatch):
    """A vLLM made of the listed files, with what is listed in them."""
    files = {}
    for symbol in symbols.SYMBOLS:
        scope = files.setdefault(symbol.file, {})
        *outer, last = symbol.name.split(".")
        for part in outer:
            scope = scope.setdefault(part, {})
        scope.setdefault(last, symbol.arguments)

    def source(scope, indent=""):
        for name, value in scope.items():
            if isinstance(value, dict):
                yield f"{indent}class {name}:"
                yield from source(value, indent + "    ")
            elif value:
                yield f"{indent}def {name}({', '.join(value)}): ..."
            else:
                yield f"{indent}{name} = None"

    for name, scope in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(source(scope)))
    folders = {"vllm": tmp_path / "vllm", "flashinfer": None}
    monkeypatch.setattr(symbols, "package_folder", folders.get)
    return tmp_path


def test_what_is_listed_suffices(installation):
    assert symbols.missing_symbols() == []


@pytest.mark.parametrize("symbol", symbols.SYMBOLS, ids=str)
def test_each_lost_symbol_is_named(installation, symbol):
    path = installation / symbol.file
    name = symbol.name.split(".")[-1]
    path.write_text(path.read_text().replace(name, "renamed"))
    assert any(str(symbol) in problem for problem in symbols.missing_symbols())


def test_a_lost_argument_is_named(installation):
    path = installation / symbols._INDEXER
    path.write_text(path.read_text().replace("pcp_plan", "plan"))
    assert "build_prefill_chunk_metadata lost pcp_plan" in " ".join(symbols.missing_symbols())


def test_a_lost_file_is_named(installation):
    (installation / symbols._WORKER).unlink()
    assert symbols.missing_symbols() == [f"{symbols._WORKER} is gone"]


def test_a_flashinfer_that_differs_is_named(installation, tmp_path, monkeypatch):
    folder = tmp_path / "flashinfer"
    folder.mkdir()
    folders = {"vllm": tmp_path / "vllm", "flashinfer": folder}
    monkeypatch.setattr(symbols, "package_folder", folders.get)
    assert "is gone" in symbols.missing_symbols()[0]
    arguments = [name for name in flashinfer.REQUIRED_ARGUMENTS if name != "lse"]
    head = f"def {flashinfer.FUNCTION}(\n    " + ",\n    ".join(arguments) + ",\n) -> (int, str):\n"
    (folder / "decode.py").write_text(head + "    return 1\n")
    assert symbols.missing_symbols() == [f"flashinfer's {flashinfer.FUNCTION} lost lse"]
    (folder / "decode.py").write_text(head.replace(",\n) ->", ",\n    lse=(1, 2),\n) ->"))
    assert symbols.missing_symbols() == []


@pytest.mark.parametrize("error", [OSError("no"), SyntaxError("no"), ValueError("no")])
def test_source_that_cannot_be_read_switches_the_plugin_off(monkeypatch, error):
    from vllm_dcp_mla import plugin
    from vllm_dcp_mla.compat import installed

    def broken():
        raise error

    monkeypatch.setattr(symbols, "missing_symbols", broken)
    monkeypatch.setattr(installed, "installed_version", lambda name: "0.33.0")
    assert "cannot be read" in plugin.why_off()
