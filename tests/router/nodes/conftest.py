"""Tests of token streams run with the compiled extension and without it."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.protocol import frames, wire
from kvferry.router.nodes import delta_queue, message_validation


@pytest.fixture(params=["compiled", "python"])
def twin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Handle token deltas in compiled code, where it is installed, or in Python."""
    if request.param == "python":
        monkeypatch.setattr(wire, "_COMPILED", {})
        monkeypatch.setattr(message_validation, "plain", frames._left_to_python)
        monkeypatch.setattr(delta_queue, "join", frames._left_to_python)
    elif not frames.IS_COMPILED:
        pytest.skip("the extension is not installed")
