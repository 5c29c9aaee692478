"""Check that docstrings describe fields and parameters that exist, as a part of `docs.language`.

A field list consists of sentences such as `name: what it holds.`, or of lines with the names before two spaces. In a
class's docstring each name is a field, method or parameter of the class or its bases, in a function's a parameter.
Values that are described in the same way stand in quotes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

NAME = r"(?:`[a-z_]\w*`|[a-z_]\w*)"
NAMES = rf"{NAME}(?:, {NAME})*"
SENTENCE = re.compile(rf"(?:(?<=[.;)] )|(?<=[.;)\n]\n)) *({NAMES}): (?=\S)")
"""Names that begin a sentence and end with a colon."""
COLUMN = re.compile(rf"^ *({NAMES}) {{2,}}(?=\S)", re.MULTILINE)
"""Names that begin a line and end with two spaces."""
VALUES = {"auto", "empty", "infinite", "negative", "others"}
"""Words that begin the description of a value, as in `empty: none`."""
Def = ast.FunctionDef | ast.AsyncFunctionDef


def findings(trees: Mapping[str, ast.Module]) -> Iterator[str]:
    """Yield what is wrong in these modules, by file name."""
    classes = {node.name: node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for name, tree in trees.items():
        yield from (f"{name}:{each}" for each in unknown_names(tree, classes))


def unknown_names(tree: ast.Module, classes: dict[str, ast.ClassDef]) -> Iterator[str]:
    """Yield the described names that do not exist; classes: those of all modules, by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | Def) and (docstring := ast.get_docstring(node)):
            known = members(node, classes) if isinstance(node, ast.ClassDef) else parameters(node)
            for name in described(docstring):
                if name not in known | VALUES:
                    yield f"{node.lineno}: {node.name} describes {name}, which it does not have"


def described(docstring: str) -> Iterator[str]:
    """Yield the names of a docstring's field list, which follows its first sentence."""
    for pattern in (SENTENCE, COLUMN):
        for match in pattern.finditer(docstring):
            yield from match[1].replace("`", "").split(", ")


def members(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Return the names of a class's fields, methods and parameters, with those of its bases."""
    found = set[str]()
    for base in node.bases:
        name = base.value if isinstance(base, ast.Subscript) else base
        parent = classes.get(getattr(name, "id", getattr(name, "attr", "")))
        found |= members(parent, classes) if parent is not None and parent is not node else set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name | ast.Attribute) and isinstance(each.ctx, ast.Store):
            found.add((each.id if isinstance(each, ast.Name) else each.attr).lstrip("_"))
        elif isinstance(each, Def):
            found |= {each.name, *parameters(each)}
    return found


def parameters(node: Def) -> set[str]:
    """Return the names of a function's parameters."""
    listed = node.args
    named = [*listed.posonlyargs, *listed.args, *listed.kwonlyargs, listed.vararg, listed.kwarg]
    return {each.arg for each in named if each is not None}
