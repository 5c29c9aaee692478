"""The README's tables say what the code says."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from api_parts import Api, FakeCluster, says

from cli.main import kvferry
from cli.options import SERVE_FIXED, flag
from docs.tables import renew, tables
from protocol.settings import ServeSettings

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_no_table_has_drifted():
    assert renew(README) == README, "run: make docs"


def test_every_table_is_there():
    for name in tables():
        assert README.count(f"<!-- table {name} -->") == 1
    with pytest.raises(KeyError):
        renew("<!-- table nosuch -->\n<!-- end -->")


def test_every_flag_of_serve_is_in_some_table():
    for field in dataclasses.fields(ServeSettings):
        shown = f"| `{flag(field.name)}` |" in README
        assert shown or field.name in SERVE_FIXED, field.name
    assert "--status-fd" not in README


def test_every_command_is_named():
    for name in kvferry.commands:
        assert re.search(rf"`kvferry {name}( [A-Z]+)?`", README), name


async def test_every_endpoint_is_named():
    described = (await Api(FakeCluster(says("x"))).http.get("/openapi.json")).json()
    named = set(re.findall(r"/[\w{}/]*", "".join(re.findall(r"^\| `[A-Z].*", README, re.MULTILINE))))
    assert {re.sub(r"{\w+}", "{id}", path) for path in described["paths"]} <= named
