"""The reference pages say what the code says."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from docs.api_tables import openapi
from docs.tables import REFERENCE, tables, update_tables
from kvferry.cli.main import kvferry
from kvferry.cli.options import SERVE_FIXED, flag
from kvferry.protocol.settings import ServeSettings

PAGES = {page.name: page.read_text() for page in sorted(REFERENCE.glob("*.md"))}
LIMIT = re.compile(r"`(--[\w-]+)` \((\d[\d,^]*)")


@pytest.mark.parametrize("name", PAGES)
def test_no_table_has_drifted(name: str) -> None:
    assert update_tables(PAGES[name]) == PAGES[name], "run: make docs"


@pytest.mark.parametrize("name", tables())
def test_every_table_is_on_one_page(name: str) -> None:
    assert "".join(PAGES.values()).count(f"<!-- table {name} -->") == 1


def test_an_unknown_table_is_an_error() -> None:
    with pytest.raises(KeyError):
        update_tables("<!-- table nosuch -->\n<!-- end -->")


def test_every_flag_of_serve_is_in_some_table() -> None:
    for field in dataclasses.fields(ServeSettings):
        shown = f"| `{flag(field.name)}` |" in PAGES["settings.md"]
        assert shown or field.name in SERVE_FIXED, field.name
    assert "--status-fd" not in PAGES["settings.md"]


def test_every_command_is_described() -> None:
    for name in kvferry.commands:
        assert re.search(rf"^\| `kvferry {name}( [A-Z]+)?`", PAGES["settings.md"], re.MULTILINE), name


def test_every_endpoint_has_a_note() -> None:
    notes = PAGES["http-api.md"].partition("## Notes on each endpoint")[2]
    named = set(re.findall(r"/[\w{}/-]*", "".join(re.findall(r"^\| `[A-Z].*", notes, re.MULTILINE))))
    assert {re.sub(r"{\w+}", "{id}", path) for path in openapi()["paths"]} <= named


def test_limits_name_flags_with_their_defaults() -> None:
    defaults = {flag(field.name): field.default for field in dataclasses.fields(ServeSettings)}
    found = LIMIT.findall(PAGES["limits.md"])
    assert len(found) > 8
    for name, shown in found:
        base, _, power = shown.replace(",", "").partition("^")
        assert defaults[name] == int(base) ** int(power or 1), name


def test_the_limits_page_names_files_that_exist() -> None:
    root = Path(__file__).parents[2]
    for name in re.findall(r"`((?:[\w]+/)+test_\w+\.py)`", PAGES["limits.md"]):
        assert (root / name).exists(), name
