"""Settings: every field can become a flag, and the classes of one cluster do not contradict each other."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from kvferry.protocol.common_settings import CommonSettings
from kvferry.protocol.settings import RouterSettings, ServeSettings, WorkerSettings

CLASSES = [CommonSettings, RouterSettings, WorkerSettings, ServeSettings]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_field_has_a_default_that_fits_its_own_metadata_and_help(cls: type[CommonSettings]) -> None:
    for field in fields(cls):
        meta = field.metadata
        assert type(field.default).__name__ == str(field.type).partition("[")[0], field.name
        assert meta["help"], field.name
        assert not meta["help"].endswith("."), field.name
        assert not meta["choices"] or field.default in meta["choices"], field.name
        if meta["min"] is not None:
            assert meta["min"] <= field.default, field.name
        if meta["max"] is not None:
            assert field.default <= meta["max"], field.name


@pytest.mark.parametrize("cls", CLASSES)
def test_settings_are_frozen_and_named_by_keyword(cls: type[CommonSettings]) -> None:
    with pytest.raises(FrozenInstanceError):
        cls().model = "other"  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        cls("smollm2")  # type: ignore[arg-type]


def test_serve_takes_every_flag_of_its_children() -> None:
    names = {field.name for field in fields(ServeSettings)}
    assert {field.name for field in fields(RouterSettings)} <= names
    assert {field.name for field in fields(WorkerSettings)} <= names


def test_a_shared_field_means_the_same_in_router_and_worker() -> None:
    router = {field.name: field for field in fields(RouterSettings)}
    worker = {field.name: field for field in fields(WorkerSettings)}
    for name in (router.keys() & worker.keys()) - {"port", "model"}:
        assert router[name].default == worker[name].default
        assert router[name].metadata == worker[name].metadata
    assert router["model"].default == (worker["model"].default,), "a router may serve several"
