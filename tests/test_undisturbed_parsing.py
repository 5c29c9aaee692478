"""A finaliser that parses source does not make another parse fail."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator

import pytest

from tests import undisturbed_parsing

SOURCE = "\n".join(f"y{number} = [a + {number} for a in range({number})]" for number in range(200))


class Parsing:
    """Object of a cycle that parses when it is collected."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        ast.parse("x = 1")


@pytest.fixture
def eager_collector() -> Iterator[None]:
    """Collect garbage after each few objects."""
    before = gc.get_threshold()
    gc.set_threshold(50)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("eager_collector")
def test_a_finaliser_that_parses_disturbs_no_other() -> None:
    assert ast.parse is undisturbed_parsing.parse
    for _ in range(100):
        Parsing()
        assert len(ast.parse(SOURCE).body) == 200
