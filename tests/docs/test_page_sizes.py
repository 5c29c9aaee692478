"""Pages stay short enough to be read."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES = {
    "README.md": 250,
    "DESIGN.md": 200,
    "docs/design/*.md": 150,
    "docs/adr/*.md": 150,
    "docs/how-to/own-model.md": 60,
    "docs/how-to/kubernetes.md": 60,
    "docs/how-to/hit-rate.md": 60,
}
"""Longest page by pattern, in lines."""


@pytest.mark.parametrize("pattern", MAX_LINES)
def test_pages_are_short(pattern: str) -> None:
    found = list(ROOT.glob(pattern))
    assert found
    long = {path.name: count for path in found if (count := len(path.read_text().splitlines())) > MAX_LINES[pattern]}
    assert long == {}


def test_every_page_of_the_site_is_in_its_navigation() -> None:
    listed = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if page not in listed] == []
