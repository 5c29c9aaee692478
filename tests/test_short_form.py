from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import short_form
from tests.short_form import MATRICES, SHORT, covering, shorten

HERE = Path(__file__).parent
DICTS: list[dict[str, int]] = [{}, {}]


class Item:
    """A test as pytest collects it."""

    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)


def item(file: str, test: str, **params: Any) -> Any:
    spec = {"callspec": SimpleNamespace(params=params)} if params else {}
    return Item(path=HERE / file, name=f"{test}[{params}]" if params else test, **spec)


def collected(file: str) -> list[Any]:
    return [
        *(item(file, "test_product", kind=kind, size=size) for kind, size in product("abc", [1, 2])),
        *(item(file, "test_other", kind=kind) for kind in "abcd"),
        *(item(file, "test_changes", changes=changes) for changes in DICTS),
        *(item(file, "test_whole", kind=kind) for kind in "abcd"),
        item(file, "test_single"),
    ]


def test_every_value_is_there_and_no_case_is_there_for_nothing() -> None:
    cases = [{f"test {test}", f"a {a}", f"b {b}"} for test in range(3) for a in range(5) for b in range(2)]
    chosen = covering(cases)
    assert set().union(*(cases[position] for position in chosen)) == set().union(*cases)
    assert len(chosen) == 5
    assert chosen == sorted(set(chosen))
    assert covering([]) == []
    assert covering([{"x"}, {"x"}]) == [0], "of equal ones the first"


def test_those_that_ask_get_each_test_and_each_value_once_in_the_named_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_form, "MATRICES", {"test_matrix.py": ("test_whole",)})
    items = collected("test_matrix.py") + collected("test_other.py")
    monkeypatch.setenv(SHORT, "1")
    kept = items.copy()
    left_out = shorten(kept)
    assert [each for each in items if each in kept] == kept
    assert len(kept) + len(left_out) == len(items)
    others = [each for each in kept if each.path.name == "test_other.py"]
    assert len(others) == len(collected("test_other.py"))
    short = [each for each in kept if each.path.name == "test_matrix.py"]
    assert len(short) == 3 + 1 + 2 + 1 + 4, (
        "three kinds, a fourth by another test, each dict, a single one, a whole one"
    )


def test_others_get_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_form, "MATRICES", {"test_matrix.py": ("test_whole",)})
    monkeypatch.delenv(SHORT, raising=False)
    items = collected("test_matrix.py")
    assert shorten(items) == []
    assert len(items) == len(collected("test_matrix.py"))


def test_the_files_that_are_named_are_there() -> None:
    for name, whole in MATRICES.items():
        (path,) = HERE.rglob(name)
        assert all(f"def {test}(" in path.read_text() for test in whole), name
