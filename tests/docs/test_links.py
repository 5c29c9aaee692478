"""Links between the documents lead somewhere: to files that there are, and to headings in them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[[^\]\[]*\]\(([^()\s]+)\)")
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def documents() -> list[str]:
    found = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    return found.stdout.split()


def anchors(text: str) -> set[str]:
    """Of its headings, as they are made where the repository is read."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def broken(document: Path, text: str) -> list[str]:
    """Its links that lead nowhere."""
    wrong = []
    for link in LINK.findall(CODE.sub("", text)):
        path, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("name", documents())
def test_links_lead_somewhere(name: str) -> None:
    assert broken(ROOT / name, (ROOT / name).read_text()) == []


def test_a_broken_one_would_be_noticed() -> None:
    text = "[a](README.md#install-and-run) [b](README.md#nowhere) [c](nothing.md) [d](#such)\n## such\n"
    assert broken(ROOT / "x.md", text.replace("[d](#such)", "")) == ["README.md#nowhere", "nothing.md"]
