"""What is found by lines is what the parsed file has."""

import ast
import re

import pytest

from vllm_dcp_mla.compat import source, symbols
from vllm_dcp_mla.compat.installed import package_folder
from vllm_dcp_mla.compat.releases import installed_release
from vllm_dcp_mla.compat.source import SourceFile

TEXT = '''"""Module.

hidden: int
def hidden(): ...
"""
from a import (
    b as c,  # why
    d,
)
from e import f, g
limit: int = 3
first = second = 1


def plain(one, *, two=(1, 2)): ...


@decorated
def long(
    one: "tuple[int, int]",
    *args,
    two: dict[str, int] | None = None,  # (of two)
) -> tuple[int, int]:
    """hidden: a docstring."""
    inner = 1
    text = """
hidden
"""


async def later(): ...


class Thing(
    Base,
    tag=True,
):
    """hidden: int

    hidden: int
    """

    field: int
    """hidden: what a field is
    hidden: int"""
    other = 1

    def method(self, x, /, y): ...

    class Inner:
        def deep(self, z):
            hidden = 1

    if True:
        def conditional(self): ...
'''


@pytest.mark.parametrize(
    "name",
    [
        *("c", "d", "f", "g", "limit", "first", "second", "plain", "long", "Thing"),
        *("Thing.field", "Thing.other", "Thing.method", "Thing.Inner", "Thing.Inner.deep"),
    ],
)
def test_what_is_there(name):
    assert SourceFile(TEXT).lacks(name) is None


@pytest.mark.parametrize(
    "name",
    [
        *("hidden", "b", "inner", "later", "one", "field", "method", "plain.one", "c.x", "Base"),
        *("Thing.hidden", "Thing.tag", "Thing.Base", "Thing.conditional", "Thing.Inner.hidden"),
        "limit.real",
    ],
)
def test_what_is_not(name):
    assert SourceFile(TEXT).lacks(name) == "is gone"


@pytest.mark.parametrize(
    ("name", "taken", "lost"),
    [
        ("plain", ("one", "two"), ("three",)),
        ("long", ("one", "two"), ("args", "inner")),
        ("Thing.method", ("self", "x", "y"), ("z",)),
        ("Thing.Inner.deep", ("z",), ("hidden",)),
    ],
)
def test_arguments(name, taken, lost):
    assert SourceFile(TEXT).lacks(name, taken) is None
    assert SourceFile(TEXT).lacks(name, (*lost, *taken)) == f"lost {', '.join(lost)}"


def test_what_is_no_function_takes_nothing_that_could_be_lost():
    assert SourceFile(TEXT).lacks("limit", ("x",)) is None


def test_an_empty_file_has_nothing():
    assert SourceFile("").lacks("x") == "is gone"


def test_a_file_that_is_no_python_is_said_when_something_is_missing():
    broken = SourceFile("def there(): ...\ndef broken(:\n")
    assert broken.lacks("there") is None
    with pytest.raises(SyntaxError):
        broken.lacks("gone")


def installed_files():
    root = package_folder("vllm").parent
    relied_on = symbols.symbols_of(installed_release())
    return {s.file: (root / s.file).read_text("utf-8") for s in relied_on}, relied_on


@pytest.mark.vllm
def test_the_installed_vllm_is_not_parsed(monkeypatch):
    """Else every process of it starts slower."""
    whole = []
    monkeypatch.setattr(source, "_lacks", lambda tree, parts, arguments: whole.append(parts))
    assert symbols.missing_symbols() == []
    assert whole == []


def names_of(scope):
    for node in scope.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


@pytest.mark.vllm
def test_nothing_is_found_by_lines_that_the_installed_vllm_lacks():
    for file, text in installed_files()[0].items():
        tree = ast.parse(text)
        found = SourceFile(text)
        classes = {(n.name,): n for n in tree.body if isinstance(n, ast.ClassDef)}
        for scope, node in {(): tree, **classes}.items():
            found._block((*scope, "x"))
            assert found._blocks[scope].keys() <= set(names_of(node)), (file, scope)


@pytest.mark.vllm
def test_each_symbol_that_the_installed_vllm_would_rename_is_named():
    files, relied_on = installed_files()
    for symbol in relied_on:
        *_, last = symbol.name.split(".")
        text = re.sub(rf"\b{last}\b", f"{last}_renamed", files[symbol.file])
        assert SourceFile(text).lacks(symbol.name, symbol.arguments) == "is gone", symbol
        for argument in symbol.arguments:
            text = re.sub(rf"\b{argument}\b", f"{argument}_", files[symbol.file])
            lack = SourceFile(text).lacks(symbol.name, symbol.arguments)
            assert lack is not None, (symbol, argument)
