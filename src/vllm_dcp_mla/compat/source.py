"""Whether a Python file defines a name, from its text; nothing is imported.

vLLM's files are long, and every process of it looks: a definition is first sought by the lines that
statements begin with, within the block of its class. What is not found so is sought again in the
parsed file, and only that counts as missing.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from textwrap import dedent

_INDENT = 4


class SourceFile:
    """A file's text, asked for definitions by their dotted name inside it.

    Args:
        text: the source; not parsed before a name is not found without.
    """

    def __init__(self, text: str) -> None:
        self._blocks: dict[tuple[str, ...], dict[str, str]] = {(): _blocks(text, 0)}
        self._text = text
        self._tree: ast.Module | None = None

    def lacks(self, name: str, arguments: tuple[str, ...] = ()) -> str | None:
        """What is not there: "is gone", or "lost" and the arguments; None when all is.

        Args:
            name: of a function, class or method, of an import or of an assigned name.
            arguments: names that a function must take.

        Raises:
            SyntaxError: something is not found, and the file is no Python.
        """
        parts = tuple(name.split("."))
        block = self._block(parts)
        if block is not None and (not arguments or set(arguments) <= _arguments_of(block)):
            return None
        if self._tree is None:
            self._tree = ast.parse(self._text)
        return _lacks(self._tree, parts, arguments)

    def _block(self, parts: tuple[str, ...]) -> str | None:
        *outer, last = parts
        scope = tuple(outer)
        if scope not in self._blocks:
            block = self._block(scope)
            is_class = block is not None and block.lstrip().startswith("class ")
            self._blocks[scope] = _blocks(block, _INDENT * len(scope)) if block and is_class else {}
        return self._blocks[scope].get(last)


@cache
def _openings(indent: int) -> re.Pattern[str]:
    """Lines of an indentation with which a statement begins."""
    return re.compile(
        rf"""^[ ]{{{indent}}}(?:
            [rRbBuUfF]*(?P<quote>\"\"\"|''')[\s\S]*?(?P=quote)  # no line of it begins anything
            | (?:def|class)[ ](?P<defined>\w+)
            | (?P<assigned>\w+)(?::[ ]*[^\s=]|[ ]=[ ])
            | from[ ]\S+[ ]import[ ](?P<imported>\([^()]*\)|[^\n(]+)
            | [^\s#)\]}}]
        )""",
        re.MULTILINE | re.VERBOSE,
    )


def _blocks(text: str, indent: int) -> dict[str, str]:
    """Each name that a scope's statements define, with the statement's text; the first counts."""
    openings = list(_openings(indent).finditer(text))
    ends = [*(opening.start() for opening in openings), len(text)][1:]
    found: dict[str, str] = {}
    for opening, end in zip(openings, ends, strict=True):
        names = [opening["defined"] or opening["assigned"]]
        if opening["imported"]:
            names = [item.split()[-1] for item in _imports(opening["imported"])]
        for name in names:
            if name:
                found.setdefault(name, text[opening.start() : end])
    return found


def _imports(text: str) -> list[str]:
    lines = [line.partition("#")[0] for line in text.strip("()").splitlines()]
    return [item for item in " ".join(lines).split(",") if item.strip()]


_HEAD = re.compile(
    r"""\s*def[ ]\w+\(
        (?: [^()\n]*\)[^\n]*: | [\s\S]*?^[ ]*\)[^\n]*: )  # on one line, or more
        [ ]*(?:\#.*)?$
    """,
    re.MULTILINE | re.VERBOSE,
)


def _arguments_of(block: str) -> set[str]:
    """What a function takes, by its head alone; none for what is no function."""
    head = _HEAD.match(block)
    if head is None:
        return set()
    try:
        (node,) = ast.parse(dedent(head[0]) + " ...").body
    except SyntaxError:
        return set()
    return _names(node) if isinstance(node, ast.FunctionDef) else set()


def _names(node: ast.FunctionDef) -> set[str]:
    arguments = node.args
    return {a.arg for a in arguments.posonlyargs + arguments.args + arguments.kwonlyargs}


def _lacks(tree: ast.Module, parts: tuple[str, ...], arguments: tuple[str, ...]) -> str | None:
    node: ast.stmt | ast.Module | None = tree
    for part in parts:
        node = _member(node, part) if isinstance(node, ast.Module | ast.ClassDef) else None
        if node is None:
            return "is gone"
    if isinstance(node, ast.FunctionDef) and arguments:
        taken = _names(node)
        lost = [name for name in arguments if name not in taken]
        if lost:
            return f"lost {', '.join(lost)}"
    return None


def _member(scope: ast.Module | ast.ClassDef, name: str) -> ast.stmt | None:
    for node in scope.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and name in {a.asname or a.name for a in node.names}:
            return node
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return node
    return None
