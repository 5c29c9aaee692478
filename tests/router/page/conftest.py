"""One browser for all tests of a file; a test needs one, or is skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser import CHROMIUM, Page, browser


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip("no chromium on the PATH")
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page
