"""Links between the documents lead to files that exist and to headings in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.links import ROOT, broken, documents


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    assert broken(document, document.read_text()) == []


def test_a_broken_link_is_reported() -> None:
    text = "[a](README.md#quick-start) [b](README.md#nowhere) [c](nothing.md) [d](#such)\n## such\n"
    assert broken(ROOT / "x.md", text.replace("[d](#such)", "")) == ["README.md#nowhere", "nothing.md"]


def test_links_inside_code_and_to_other_sites_are_ignored() -> None:
    text = "`[a](nothing.md)` [b](https://example.org/nothing) [c](mailto:a@example.org)\n```\n[d](nothing.md)\n```\n"
    assert broken(ROOT / "x.md", text) == []
