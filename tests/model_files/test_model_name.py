"""Names: whose are whose, and how they are given."""

from __future__ import annotations

import pytest

from kvferry.model_files.model_name import ModelName, require_distinct, split_names
from kvferry.protocol.errors import ConfigError


def test_a_model_goes_by_its_own_name_until_it_is_given_others() -> None:
    assert ModelName("files").all == ("files",)
    named = ModelName("files", ("a", "b"))
    assert (named.all, named.first) == (("a", "b"), "a")


def test_who_shares_a_name_and_who_resembles() -> None:
    plain, first, second = ModelName("m"), ModelName("m", ("a", "x")), ModelName("m", ("b",))
    assert first.shares(ModelName("elsewhere", ("x",)))
    assert ModelName("a").shares(first)
    assert not first.shares(second)
    assert not first.resembles(second), "each was given names to be told apart by"
    assert plain.resembles(first)
    assert second.resembles(plain)
    assert not plain.resembles(ModelName("n"))


@pytest.mark.parametrize(
    ("given", "models", "names"),
    [
        ((), 2, [(), ()]),
        (("a",), 1, [("a",)]),
        (("a, b", "c", "a"), 1, [("a", "b", "c")]),
        (("a,b", "c"), 2, [("a", "b"), ("c",)]),
    ],
)
def test_served_names_are_given_in_the_order_of_models(
    given: tuple[str, ...], models: int, names: list[tuple[str, ...]]
) -> None:
    assert split_names(given, models) == names


@pytest.mark.parametrize(
    ("given", "models", "message"),
    [(("a",), 2, "2 models and 1 values"), (("a", "b", "c"), 2, "3 values"), ((" ,",), 1, "is empty")],
)
def test_names_that_do_not_fit_the_models_are_refused(given: tuple[str, ...], models: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        split_names(given, models)
    assert caught.value.param == "served_model_name"


def test_two_models_of_one_name_are_refused() -> None:
    require_distinct([ModelName("m", ("a",)), ModelName("m", ("b",)), ModelName("c")])
    with pytest.raises(ConfigError, match="two models have the name 'a'"):
        require_distinct([ModelName("a"), ModelName("m", ("b", "a"))])
