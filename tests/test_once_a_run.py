"""One process of a run computes what others need too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.once_a_run import RUN, once_a_run


def test_the_first_one_computes_and_the_others_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN, str(tmp_path))
    made = [once_a_run("a", lambda: [1, {"b": 0.1}]), once_a_run("a", lambda: pytest.fail("computed again"))]
    assert made == [[1, {"b": 0.1}]] * 2
    assert once_a_run("other", lambda: 2) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "other.json"]


def test_another_run_computes_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        monkeypatch.setenv(RUN, str(tmp_path / str(number)))
        assert once_a_run("a", lambda number=number: number) == number
    monkeypatch.delenv(RUN)
    assert [once_a_run("a", lambda number=number: number) for number in range(2)] == [0, 1]
