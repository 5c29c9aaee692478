"""Modules that anything imports from the package exist, also where no type checker looks."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def exists(module: str) -> bool:
    path = ROOT / module.replace(".", "/")
    return path.with_suffix(".py").exists() or path.is_dir() or bool([*path.parent.glob(f"{path.name}.*")])


def imported(path: Path) -> set[str]:
    found = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom))
    return {node.module for node in found if node.module and node.module.startswith("kvferry.")}


def test_imported_modules_exist() -> None:
    files = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    missing = {
        (name, module)
        for name in files.split()
        if (ROOT / name).is_file()
        for module in imported(ROOT / name)
        if not exists(module) and not exists(module.removeprefix("kvferry."))
    }
    assert missing == set()
