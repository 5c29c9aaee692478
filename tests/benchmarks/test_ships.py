"""The benchmark of checksums in a short form: whole ships between two processes, with and without them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from benchmarks import ships
from kvferry.kv_transfer.sender import Sender

SENDS_END_S = 0.1


@pytest.mark.slow
def test_ships_whose_blocks_are_sent_before_the_commit_are_timed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Then `sent` comes, too. An event that raises is logged by the link's thread and its ship goes on."""
    commit = Sender.commit

    def late(sender: Sender, *arguments: Any) -> None:
        time.sleep(SENDS_END_S)
        commit(sender, *arguments)

    monkeypatch.setattr(Sender, "commit", late)
    taken = ships.compare(blocks=4, size=48 << 10, ships=1)
    assert [SENDS_END_S < seconds < ships.LIMIT_S for pair in taken for seconds in pair] == [True, True]
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
