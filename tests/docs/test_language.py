"""The language check finds what it is for."""

from __future__ import annotations

import pytest

from docs.language import in_code, retired

GOOD = """\'\'\'Bounded log of requests.\'\'\'

LIMIT_S = 3
MOST = 4
\'\'\'Requests kept.\'\'\'


def add() -> None:
    \'\'\'Add.\'\'\'
"""


def test_plain_code_passes() -> None:
    assert list(in_code(GOOD)) == []


@pytest.mark.parametrize(
    ("code", "finding"),
    [
        ("x = 1\n", "1: the module has no docstring"),
        ('"""What is kept."""\n', "1: the docstring begins with a noun clause"),
        ('"""Log of requests,\nand of others."""\n', "1: the first sentence does not stand alone"),
        ('"""Log."""\nMOST = 4\n', "2: MOST names no unit"),
        ('"""Log."""\n\n\nclass Log:\n    pass\n', "4: Log has no docstring"),
        ('"""Log."""\n\n\ndef add(): ...\n', "4: add has no docstring"),
        ('"""Log.\n\nOf one journey."""\n', "3: retired term 'journey'"),
        ('"""Log."""\nx = 1  # whoever asks\n', "2: retired term 'whoever'"),
    ],
)
def test_what_breaks_a_rule_is_found(code: str, finding: str) -> None:
    (found,) = in_code(code)
    assert found.startswith(finding)


def test_private_names_need_no_docstring() -> None:
    assert list(in_code('"""Log."""\n_MOST = 4\n\n\ndef _add(): ...\n')) == []


def test_lines_of_documents_are_counted() -> None:
    assert list(retired("one\ntwo\nan heir\n", 1)) == ["3: retired term 'heir'"]
