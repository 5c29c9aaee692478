"""Damaged and changed model files: read, or refused by an error that names the model. No crash, no hang.

`make fuzz` reads thousands; otherwise some dozens are.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.file_fuzz import fuzzed

COUNT = int(os.environ.get("KVFERRY_TEST_MUTANTS", "120"))
FIRST = int(os.environ.get("KVFERRY_TEST_MUTANTS_FROM", "0"))
TOLD_S = 30.0
"""Time between two lines about what came of the mutants, in seconds."""


@pytest.mark.slow
@pytest.mark.timeout(300 + COUNT)
def test_mutants_of_a_models_files_are_read_or_refused(tmp_path: Path) -> None:
    wrong, refused, again, begun = [], 0, 0, time.monotonic()
    told_at = begun
    for count, each in enumerate(fuzzed(tmp_path, FIRST, FIRST + COUNT), 1):
        assert each.seed == FIRST + count - 1
        refused += bool(each.said)
        again += each.again
        if each.wrong:
            wrong.append(f"mutant {each.seed} ({each.done}): {each.wrong}")
            print(wrong[-1], flush=True)
        if count == COUNT or time.monotonic() > told_at + TOLD_S:
            told_at = time.monotonic()
            rate = count / (told_at - begun)
            told = f"{refused} refused, {count - refused} read; {again} as an earlier one, {len(wrong)} wrong"
            print(f"{count} mutants from {FIRST}: {told}; {rate:.0f} a second", flush=True)
    assert count == COUNT
    assert not wrong, "\n".join(wrong)
    assert 0.2 * COUNT < refused < 0.95 * COUNT, "the mutants are too tame, or nothing is read"
