"""Every path of the repository that a document names exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
FOLDERS = {"/".join(parts[:count]) for file in FILES if (parts := file.split("/")) for count in range(1, len(parts))}
TOPS = {file.split("/")[0] for file in FILES}
SUFFIX = re.compile(r"\.(py|yaml|toml|cpp|h|json)$")
ELSEWHERE = {
    "benchmarks/results", "generation_config.json", "keys.toml", "modules.json", "tekken.json", "tokenizer.json"
}  # fmt: skip
"""What commands write, and files of users and models."""


def named(text: str) -> set[str]:
    """Words in backquotes that look like paths here."""
    words = {word.strip(".,;:()\"'") for quoted in re.findall(r"`([^`\n]+)`", text) for word in quoted.split()}
    paths = {word.rstrip("/") for word in words if re.fullmatch(r"[A-Za-z_][\w./-]*", word)}
    return {path for path in paths if ("/" in path and path.split("/")[0] in TOPS) or SUFFIX.search(path)}


def exists(path: str) -> bool:
    """Here, or below some folder: pages leave out what their subject says."""
    known = {*FILES, *FOLDERS}
    return path in known or any(each.endswith(f"/{path}") for each in known)


@pytest.mark.parametrize("document", [file for file in FILES if file.endswith(".md") and "/helm/" not in file])
def test_paths_that_a_document_names_exist(document: str) -> None:
    missing = {path for path in named((ROOT / document).read_text()) if not exists(path)}
    assert missing - ELSEWHERE == set()


def test_a_path_that_is_not_there_is_found() -> None:
    text = "`router/nowhere/x.py`, `runtime/nowhere.py` and `router/api/app.py --flag`"
    assert {path for path in named(text) if not exists(path)} == {"router/nowhere/x.py", "runtime/nowhere.py"}
