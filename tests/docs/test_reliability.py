"""Each promise of the reliability page names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/.]+)`", PAGE)))


@pytest.mark.parametrize("name", NAMED)
def test_the_named_test_exists(name: str) -> None:
    assert (ROOT / name).exists()


def test_each_promise_names_a_test() -> None:
    promises = [line for line in PAGE.partition("\n## ")[0].splitlines() if line.startswith("| ")][2:]
    assert len(promises) > 25
    assert [line for line in promises if "`tests/" not in line and "`make " not in line] == []
