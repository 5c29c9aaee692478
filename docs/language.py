"""Check the language of code and documents: `make lint` runs it after the links.

Every module, public class and public function has a docstring. A module's first paragraph is one line and no noun
clause. Field lists name fields that exist (`docs.field_lists`). Public numeric constants name their unit, by suffix or
docstring. Retired terms stand in no docstring, comment or document.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from docs import field_lists

ROOT = Path(__file__).resolve().parent.parent
NOUN_CLAUSES = re.compile(
    r"(What|Whoever|Who|Whose|Whether|How|Where|Why|Which|When|Of|That|Those|As|By|To|For|Nobody|Nothing)\b"
)
"""First words of docstrings that say neither what a thing is nor what it does."""
RETIRED = re.compile(
    r"\b(journeys?|heirs?|chronicles?|errands?|courtesy|farewell|foreigners?|likeness|whoever|pays? toll)\b",
    re.IGNORECASE,
)
"""Words that the project once used for dispatch, successor, request log, background call and so on."""
UNITS = re.compile(r"S$|_(MIB|GIB|MB|GB|PERCENT|VERSION|PORT|TAG|BYTE)$|^KIB$")
"""Endings of names that state a unit: plurals count what they name."""
DESCRIBED_ELSEWHERE = {"protocol/errors.py"}
"""Files whose classes the module's docstring describes."""
LANGUAGE_RULES = {"docs/language.py", "CHANGELOG.md"}
"""Files that must name retired terms."""


def main() -> None:
    """Print all findings and exit with status 1 where there are any."""
    files = subprocess.check_output(["git", "ls-files", "*.py", "*.md"], cwd=ROOT, text=True).split()
    packages = {path.name for path in (ROOT / "kvferry").iterdir() if path.is_symlink()}
    found, trees = list[str](), dict[str, ast.Module]()
    for name in files:
        path = ROOT / name
        if path.is_symlink() or not path.is_file() or name in LANGUAGE_RULES or name.startswith("tests/"):
            continue
        text = path.read_text()
        if name.split("/")[0] in packages:
            found += [f"{name}:{finding}" for finding in in_code(text, classes=name not in DESCRIBED_ELSEWHERE)]
            trees[name] = ast.parse(text)
        elif name.endswith(".md"):
            found += [f"{name}:{finding}" for finding in retired(text, 1)]
    found += field_lists.findings(trees)
    print("\n".join(found) or "the language holds", file=sys.stderr if found else sys.stdout)
    sys.exit(bool(found))


def in_code(text: str, *, classes: bool = True) -> Iterator[str]:
    """Findings in one module of the packages; classes: whether each needs a docstring."""
    tree = ast.parse(text)
    yield from module_docstring(tree)
    for node, behind in zip(tree.body, [*tree.body[1:], None], strict=bool(tree.body)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if classes and not node.name.startswith("_") and not ast.get_docstring(node):
                yield f"{node.lineno}: {node.name} has no docstring"
        elif (constant := numeric_constant(node)) and not UNITS.search(constant) and not is_docstring(behind):
            yield f"{node.lineno}: {constant} names no unit"
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and '"""' in token.string):
            yield from retired(token.string, token.start[0])


def module_docstring(tree: ast.Module) -> Iterator[str]:
    """Findings in a module's docstring."""
    if (docstring := ast.get_docstring(tree)) is None:
        if tree.body:
            yield "1: the module has no docstring"
        return
    first, *more = docstring.split("\n\n")[0].split("\n")
    if NOUN_CLAUSES.match(first):
        yield f"1: the docstring begins with a noun clause: {first}"
    if first[-1] not in ".:?" or (more and first[-1] != ":"):
        yield f"1: the first sentence does not stand alone on its line: {first}"


def numeric_constant(node: ast.stmt) -> str | None:
    """Return the name of a public numeric constant that the statement defines."""
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    value = getattr(node, "value", None)
    if isinstance(target, ast.Name) and target.id.isupper() and isinstance(value, ast.Constant):
        return target.id if type(value.value) in (int, float) and not target.id.startswith("_") else None
    return None


def is_docstring(node: ast.stmt | None) -> bool:
    """Return whether the statement is a bare string."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def retired(text: str, line: int) -> Iterator[str]:
    """Findings of retired terms in a text that begins on this line."""
    for match in RETIRED.finditer(text):
        yield f"{line + text.count(chr(10), 0, match.start())}: retired term {match[0]!r}"


if __name__ == "__main__":
    main()
