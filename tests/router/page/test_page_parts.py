"""The chat page's files, joined: one response that loads nothing, in parts that a reader holds in mind."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import httpx
import pytest

from kvferry.router.page import page as joined
from kvferry.router.page.page import chat_page
from tests.api_parts import Api, FakeCluster, says
from tests.test_sizes import FILE_LINES

FOLDER = Path(__file__).parents[3] / "router"


async def test_the_page_is_one_file_that_loads_nothing() -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(Api(FakeCluster(says("x")), api_key="k").app)) as http:
        response = await http.get("http://router/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "require-trusted-types-for 'script'; trusted-types 'none'" in policy
    assert "unsafe" not in policy
    assert "http://" not in response.text
    assert "https://" not in response.text
    assert " style=" not in response.text, "the policy would take it away"
    assert "innerHTML" not in response.text
    assert response.content == chat_page().body


def test_every_script_and_style_is_part_of_the_page() -> None:
    for folder, names in (("scripts", joined.SCRIPTS), ("styles", joined.STYLES)):
        assert sorted(names) == sorted(path.name for path in (FOLDER / "page" / folder).iterdir())
    text = bytes(chat_page().body).decode()
    assert "{{ script }}" not in text
    assert "{{ style }}" not in text
    assert text.count("</script>") == text.count("</style>") == 1


def test_no_two_scripts_define_one_name() -> None:
    defined = re.compile(r"^(?:async )?(?:function\*?|class|const|let) (\w+)", re.MULTILINE)
    names = Counter(name for path in (FOLDER / "page/scripts").iterdir() for name in defined.findall(path.read_text()))
    assert len(names) > 100
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("kind", ["js", "css", "html"])
def test_scripts_styles_and_pages_stay_small(kind: str) -> None:
    sizes = {path.name: len(path.read_text().splitlines()) for path in FOLDER.rglob(f"*.{kind}")}
    assert sizes
    assert [name for name, lines in sizes.items() if lines > FILE_LINES] == []
