"""The list of coupled symbols is complete, and a difference is noticed."""

import ast
from collections import Counter
from pathlib import Path

import pytest

import vllm_dcp_mla
from vllm_dcp_mla.compat import flashinfer, symbols
from vllm_dcp_mla.compat.releases import RELEASES, installed_release

PACKAGE = Path(vllm_dcp_mla.__file__).parent
#: What runs inside an engine; the rest of the package only looks at vLLM from outside.
ENGINE = (
    "plugin.py",
    "device_buffer.py",
    "settings.py",
    "warmup.py",
    "backends",
    "compat",
    "indexer",
    "kernels",
)
#: What serves a member alone, and is imported with it.
FILES = {
    "FLASH_ATTN_MLA_SPARSE_FA4": ("backends/flash_attn_4.py",),
    "FLASH_ATTN_MLA_SPARSE": (
        *("backends/hopper.py", "backends/hopper_kernels.py", "compat/flat_cache.py"),
        *("backends/wide_keys.py", "backends/wide_metadata.py", "kernels/widen.py"),
        *("kernels/flashmla.py", "kernels/flash_attn3.py", "kernels/triton_decode.py"),
        *("kernels/finish.py", "kernels/merge_parts.py", "kernels/spread.py"),
    ),
}


RELIED_ON = symbols.symbols_of(installed_release())
#: Packages that re-export the engine's configuration, and names that are Triton's own.
ELSEWHERE = ("vllm.triton_utils", "vllm.config")


def imported_names(release):
    """(file, module, name) of each import from vLLM that the engine may make with a series."""
    others = {f"{r.adapter}.py" for r in RELEASES} - {f"{release.adapter}.py"}
    if release.adapter == "v0_33":
        others.remove("v0_30.py")  # which it shares with
    absent = {
        file for member, files in FILES.items() if member in release.left_to_stock for file in files
    }
    if not release.gathers_here:
        absent |= {"backends/gather.py", "backends/gather_metadata.py", "compat/dcp_order.py"}
        absent |= {"backends/cached_rows.py", "kernels/store_rows.py"}
    for top in ENGINE:
        path = PACKAGE / top
        for file in [path] if path.suffix else sorted(path.glob("*.py")):
            if file.name in others or file.relative_to(PACKAGE).as_posix() in absent:
                continue
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
                    for alias in node.names:
                        yield file.name, node.module, alias.name


@pytest.mark.parametrize("release", RELEASES, ids=lambda r: r.series)
def test_every_import_from_vllm_is_listed(release):
    listed = {str(symbol) for symbol in symbols.symbols_of(release)}
    known = {
        ".".join(name.split(".")[:n]) for name in listed for n in range(1, name.count(".") + 2)
    }
    missing = [
        f"{file}: {module}.{name}"
        for file, module, name in imported_names(release)
        if f"{module}.{name}" not in known and module not in ELSEWHERE
    ]
    assert missing == []


def test_a_symbol_is_relied_on_in_some_series_and_listed_once():
    relied_on = {s for r in RELEASES for s in symbols.symbols_of(r)}
    assert Counter(symbols.SYMBOLS) == Counter(relied_on)


@pytest.mark.vllm
def test_the_installed_vllm_has_them_all():
    assert symbols.missing_symbols() == []


@pytest.fixture
def installation(tmp_path, monkeypatch):
    """A vLLM made of the listed files, with what is listed in them."""
    files = {}
    for symbol in sorted(RELIED_ON, key=lambda s: -s.name.count(".")):  # classes last
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


@pytest.mark.parametrize("symbol", RELIED_ON, ids=str)
def test_each_lost_symbol_is_named(installation, symbol):
    path = installation / symbol.file
    name = symbol.name.split(".")[-1]
    path.write_text(path.read_text().replace(name, "renamed"))
    assert any(str(symbol) in problem for problem in symbols.missing_symbols())


def test_a_lost_argument_is_named(installation):
    path = installation / symbols._INDEXER
    path.write_text(path.read_text().replace("query_slice", "slices"))
    assert "build_prefill_chunk_metadata lost query_slice" in " ".join(symbols.missing_symbols())


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
