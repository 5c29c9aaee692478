from __future__ import annotations

from typing import Any

import pytest

from router.text.transcript import Piece, Transcript


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
