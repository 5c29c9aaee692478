"""Dataclasses with a fast `__init__` are like others: arguments, defaults, equality, copies and their guard."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from typing import Any

import pytest

from kvferry.protocol.fast_init import fast_init, replaced
from kvferry.protocol.messages import Job
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate


@dataclass(frozen=True, slots=True)
class Plain:
    a: int
    b: str = "b"
    c: list[int] = field(default_factory=list)
    d: tuple[int, ...] = ()


@fast_init
@dataclass(frozen=True, slots=True)
class Fast:
    a: int
    b: str = "b"
    c: list[int] = field(default_factory=list)
    d: tuple[int, ...] = ()


@fast_init
@dataclass(frozen=True, slots=True)
class Checked:
    a: int

    def __post_init__(self) -> None:
        if self.a < 0:
            raise ValueError("a must be at least 0")


def values(each: Any) -> list[Any]:
    return [getattr(each, part.name) for part in fields(each)]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ((1,), {}),
        ((1, "x"), {"d": (2,)}),
        ((), {"a": 1, "c": [3]}),
        ((1, "x", [3], (4,)), {}),
        ((None, None, None), {}),
    ],
)
def test_objects_have_the_fields_of_a_plain_dataclass(given: tuple[Any, ...], named: dict[str, Any]) -> None:
    fast, plain = Fast(*given, **named), Plain(*given, **named)
    assert type(fast) is Fast
    assert values(fast) == values(plain)
    assert repr(fast) == repr(plain).replace("Plain", "Fast")
    assert fast == Fast(*given, **named)


def test_a_default_that_is_made_is_made_for_each() -> None:
    assert Fast(1).c is not Fast(1).c


@pytest.mark.parametrize(("given", "named"), [((), {}), ((1, 2, 3, 4, 5), {}), ((1,), {"e": 1}), ((1,), {"a": 1})])
def test_wrong_arguments_are_refused(given: tuple[Any, ...], named: dict[str, Any]) -> None:
    for kind in (Plain, Fast):
        with pytest.raises(TypeError):
            kind(*given, **named)


def test_objects_are_frozen_hashed_and_without_other_fields() -> None:
    fast = Fast(1, c=[])
    for name in ("a", "z"):
        with pytest.raises((FrozenInstanceError, AttributeError, TypeError)):
            setattr(fast, name, 2)
    assert fast.a == 1
    assert not hasattr(fast, "__dict__")
    assert hash(Checked(1)) == hash(Checked(1))
    assert Checked(1) != Checked(2)


def test_objects_are_replaced_copied_and_pickled() -> None:
    job = Job("r", 1, (1, 2), 2, Generate(SamplingParams(max_tokens=3)), "router")
    assert replace(job, attempt=2).attempt == 2
    assert values(replace(job, attempt=1)) == values(job)
    for made in (copy.copy(job), copy.deepcopy(job), pickle.loads(pickle.dumps(job))):  # noqa: S301 - own bytes
        assert made == job
        assert type(made) is Job


def test_a_check_after_the_fields_still_runs() -> None:
    assert Checked(1).a == 1
    with pytest.raises(ValueError, match="at least 0"):
        Checked(-1)


def test_classes_that_it_does_not_suit_are_refused() -> None:
    with pytest.raises(TypeError, match="not a frozen dataclass"):
        fast_init(dataclass(slots=True)(type("Mutable", (), {"__annotations__": {"a": int}})))
    with pytest.raises(TypeError, match="not a frozen dataclass"):
        fast_init(dataclass(frozen=True)(type("Open", (), {"__annotations__": {"a": int}})))
    with pytest.raises(TypeError, match="not a frozen dataclass"):
        fast_init(dataclass(frozen=True, slots=True)(type("Derived", (Checked,), {"__annotations__": {"e": int}})))


@fast_init
@dataclass(frozen=True, slots=True)
class Derived:
    a: int
    b: int = 1
    total: int = field(init=False)

    def __post_init__(self) -> None:
        made: Any = self
        made.total = self.a + self.b


def test_copies_with_other_fields_are_those_of_dataclasses() -> None:
    job = Job("r", 1, (1, 2), 2, Generate(SamplingParams(max_tokens=3)), "router")
    assert values(replaced(job, attempt=2, prompt_len=1)) == values(replace(job, attempt=2, prompt_len=1))
    assert values(job) == values(replaced(job))
    assert type(replaced(job)) is Job
    with pytest.raises((FrozenInstanceError, AttributeError, TypeError)):
        replaced(job).attempt = 3  # type: ignore[misc]
    with pytest.raises(AttributeError):
        replaced(job, unknown=1)


def test_derived_fields_are_computed_anew() -> None:
    assert (Derived(1).total, replaced(Derived(1), b=4).total, replace(Derived(1), b=4).total) == (2, 5, 5)
    assert pickle.loads(pickle.dumps(Derived(1, 2))).total == 3  # noqa: S301 - own bytes
