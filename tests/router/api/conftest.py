from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvferry.router.text.transcript import Piece, Transcript
from kvferry.structured_output.checker import Checker


@pytest.fixture(autouse=True)
async def checkers(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Those that a test's pools make end with it, and their processes."""
    made: list[Checker] = []
    monkeypatch.setattr(
        "kvferry.router.api.served_models.Checker", lambda vocabulary: made.append(Checker(vocabulary)) or made[-1]
    )
    yield
    for checker in made:
        await checker.close()


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[Piece]:
    """Pieces that come instead of the transcript's, as parsers behind it would make them."""
    pieces: list[Piece] = []
    own = Transcript.add

    def add(self: Transcript, output: Any) -> Piece:
        piece = own(self, output)
        made = pieces.pop(0)
        made.token_ids, made.finish_reason = piece.token_ids, piece.finish_reason
        return made

    monkeypatch.setattr(Transcript, "add", add)
    return pieces
