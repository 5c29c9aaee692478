"""Damaged and changed model files: read, or refused by an error that names the model. No crash, no hang.

`make fuzz` reads thousands; otherwise some dozens are.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.file_fuzz import fuzzed

COUNT = int(os.environ.get("KVFERRY_TEST_MUTANTS", "120"))
FIRST = int(os.environ.get("KVFERRY_TEST_MUTANTS_FROM", "0"))


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_mutants_of_a_models_files_are_read_or_refused(tmp_path: Path) -> None:
    found = list(fuzzed(tmp_path, FIRST, FIRST + COUNT))
    wrong = [f"mutant {each.seed} ({each.done}): {each.wrong}" for each in found if each.wrong]
    assert not wrong, "\n".join(wrong)
    refused = sum(bool(each.said) for each in found)
    print(f"{len(found)} mutants, {refused} refused, {len(found) - refused} read")
    assert [each.seed for each in found] == list(range(FIRST, FIRST + COUNT))
    assert 0.2 * COUNT < refused < 0.95 * COUNT, "the mutants are too tame, or nothing is read"
