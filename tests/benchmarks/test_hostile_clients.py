"""The attacks of the benchmark are what they say, and its table compares like with like."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from pathlib import Path

import pytest
import uvicorn

from benchmarks import attacking
from benchmarks.attacks import ATTACKS
from benchmarks.hostile import Phase, ratio, report
from benchmarks.load import Completion
from kvferry.runtime.connection_limits import Limits
from kvferry.runtime.connections import guarded
from kvferry.runtime.http import Server, bind
from tests.api_parts import Api, FakeCluster, says

ANSWERED = {
    "biases": {"200"}, "choices": {"200"}, "garbage": {"200", "400", "431"}, "refused": {"400", "404"},
    "vectors": {"200"}, "pictures": {"400"},
}  # fmt: skip
"""What each is answered by a cluster that can do everything, where it is one thing or the other; without those whose
grammars are slow, and tried behind everything else that this machine does."""


@pytest.mark.parametrize("name", ANSWERED)
async def test_attacks_are_answered_as_they_mean_to_be(name: str, tmp_path: Path) -> None:
    """One that is refused for a slip of its own would measure nothing."""
    api = Api(FakeCluster(says("Yes."), max_model_len=32_768), data_dir=str(tmp_path))
    http = guarded(Limits(body_bytes=2**24))
    server = Server(uvicorn.Config(api.app, http=http, lifespan="off", log_config=None, ws="none"))
    attacking.answers.clear()
    with bind("127.0.0.1", 0) as sock:
        run = asyncio.create_task(server.serve(sockets=[sock]))
        attack = asyncio.ensure_future(ATTACKS[name](sock.getsockname()[1]))
        async with asyncio.timeout(30):
            while sum(map(attacking.answers.__getitem__, ANSWERED[name])) < len(ANSWERED[name]):
                assert not attack.done()
                await asyncio.sleep(0.05)
        attack.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await attack
        server.should_exit = server.force_exit = True
        await asyncio.wait_for(run, 10)
    asked_for_no_key = {"200"} if name == "refused" else set()  # one of its requests has a wrong key
    assert set(attacking.answers) - {"reset", "closed"} - asked_for_no_key <= ANSWERED[name], attacking.answers


def phase(first_s: float, gap_s: float) -> Phase:
    streams = [Completion(0.0, (first_s, first_s + gap_s, first_s + 2 * gap_s), 3) for _ in range(20)]
    return Phase(streams, alive_s=[0.001, 0.2], answers=Counter({"400": 7}), cpu=Counter(router=1), seconds=2.0)


def test_the_table_compares_with_being_alone() -> None:
    phases = {"alone": phase(0.1, 0.02), "readers": phase(0.2, 0.02), "no readers": phase(0.3, 0.03), "empty": Phase()}
    assert (ratio(phases, "readers"), ratio(phases, "no readers")) == (pytest.approx(2.0), pytest.approx(1.5))
    rows = {line.split(" | ")[0][2:]: line.split(" | ")[1:] for line in report(phases).splitlines()[2:]}
    assert rows.keys() == {"alone", "readers", "no readers"}
    assert rows["no readers"][3:6] == ["1.50", "1.50", "1.50"]
    assert rows["alone"][6:11] == ["200 ms", "200 ms", "0.50", "0.00", "0.00"]
