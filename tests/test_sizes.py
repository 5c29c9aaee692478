"""The law of the house: what a reader must hold in mind at once stays small."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_floors import FLOORS, modules

FILE_LINES = 250
CLASS_LINES = 200
PUBLIC_METHODS = 12


def docstring_lines(node: ast.AST) -> int:
    """Lines of a docstring, also of a field's, which do not count: a class must not be short of explanation."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return (node.end_lineno or 0) - node.lineno + 1
    return 0


def too_large(path: Path) -> Iterator[str]:
    text = path.read_text()
    if (lines := len(text.splitlines())) > FILE_LINES:
        yield f"{path}: {lines} lines"
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ClassDef):
            continue
        lines = (node.end_lineno or 0) - node.lineno + 1 - sum(map(docstring_lines, ast.walk(node)))
        if lines > CLASS_LINES:
            yield f"{path}: class {node.name} has {lines} lines"
        methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
        public = [name for name in methods if not name.startswith("_")]
        if len(public) > PUBLIC_METHODS:
            yield f"{path}: class {node.name} has {len(public)} public methods"


@pytest.mark.parametrize("folder", FLOORS)
def test_files_and_classes_stay_small(folder: str) -> None:
    assert [found for path in modules(folder) for found in too_large(path)] == []


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports them by it: a second one, in whatever folder, ends the whole run while tests are collected."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, files in names.items() if files > 1] == []


def test_what_is_too_large_is_found(tmp_path: Path) -> None:
    methods = "".join(f"    def m{i}(self): ...\n" for i in range(PUBLIC_METHODS + 1))
    long = tmp_path / "long.py"
    long.write_text(f"class Wide:\n{methods}class Long:\n    a = (\n" + "        1,\n" * 251 + "    )\n")
    assert [line.removeprefix(f"{long}: ") for line in too_large(long)] == [
        "268 lines",
        "class Wide has 13 public methods",
        "class Long has 254 lines",
    ]
