"""The order in which tokens are passed on: first ones at once, others in slices and together."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from kvferry.protocol.messages import AttemptFailed, StepFrame, TokenDelta, TokenLogprobs
from kvferry.protocol.prefix_reuse import Reuse
from kvferry.router.nodes.capacity_summary import CapacitySummary
from kvferry.router.nodes.delta_queue import MAX_SLICE_S, MIN_SLICE_S, SMALL_FRAME, DeltaQueue, joined
from kvferry.router.nodes.node_entry import NodeEntry
from tests.fake_workers import lease_of

pytestmark = pytest.mark.usefixtures("twin")


class Listener:
    """Keeps what it hears; each delta takes `cost_s` of the clock."""

    def __init__(self, clock: Clock, cost_s: float = 0.0) -> None:
        self.heard: list[Any] = []
        self._clock, self._cost_s = clock, cost_s

    def delta(self, delta: TokenDelta) -> None:
        self.heard.append(delta)
        self._clock.now += self._cost_s

    def failed(self, failure: AttemptFailed) -> None:
        self.heard.append(failure)

    def lost(self, error: Exception) -> None:
        self.heard.append(error)

    def drains(self) -> None:
        self.heard.append("drains")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def entry_of(name: str, **listeners: Listener) -> NodeEntry:
    entry = NodeEntry(lease_of(name, "decode"), CapacitySummary("m"))
    entry.listeners.update(listeners)
    return entry


def delta(name: str, index: int, *tokens: int, **more: Any) -> TokenDelta:
    return TokenDelta(name, more.pop("attempt", 0), index, tokens or (index,), **more)


async def test_a_first_token_overtakes_the_tokens_of_others() -> None:
    clock = Clock()
    old, new = Listener(clock), Listener(clock)
    entry, queue = entry_of("d1", old=old, new=new), DeltaQueue(clock)
    queue.deal(entry, StepFrame(tuple(delta("old", index) for index in range(1, 100))))
    queue.deal(entry, StepFrame((delta("new", 0),)))
    assert (len(old.heard), new.heard) == (0, [delta("new", 0)])
    await asyncio.sleep(0)
    assert old.heard == [delta("old", 1, *range(1, 100))]


async def test_a_router_that_keeps_up_passes_a_small_frame_on_at_once_and_joins_what_follows_it() -> None:
    clock = Clock()
    listener = Listener(clock)
    entry, queue = entry_of("d1", r=listener), DeltaQueue(clock)
    for index in (1, 5):
        clock.now += 2 * MIN_SLICE_S
        queue.deal(entry, StepFrame((delta("r", index),)))
        assert listener.heard.pop() == delta("r", index)
        for later in (1, 2):  # frames of the same read
            queue.deal(entry, StepFrame((delta("r", index + later),)))
        assert listener.heard == []
        await asyncio.sleep(0)
        assert listener.heard.pop() == delta("r", index + 1, index + 1, index + 2)


@pytest.mark.parametrize("many", [SMALL_FRAME, SMALL_FRAME + 1])
async def test_a_large_frame_waits_for_a_slice(many: int) -> None:
    clock = Clock()
    listener = Listener(clock)
    entry, queue = entry_of("d1", r=listener), DeltaQueue(clock)
    clock.now += 2 * MIN_SLICE_S
    queue.deal(entry, StepFrame(tuple(delta("r", index) for index in range(1, many + 1))))
    assert len(listener.heard) == (many if many <= SMALL_FRAME else 0)
    queue.flush()


async def test_tokens_that_nobody_waits_for_are_dropped() -> None:
    clock = Clock()
    listener = Listener(clock)
    entry, queue = entry_of("d1", here=listener), DeltaQueue(clock)
    queue.deal(entry, StepFrame((delta("here", 0), delta("gone", 0), delta("here", 1), delta("gone", 1))))
    assert not entry.idle
    del entry.listeners["here"]
    queue.flush()
    assert listener.heard == [delta("here", 0)]


async def test_what_a_resumed_attempt_sends_first_does_not_wait() -> None:
    clock = Clock()
    listener = Listener(clock)
    first = delta("r", 7, attempt=1, reuse=Reuse(10, computed=10))
    DeltaQueue(clock).deal(entry_of("d1", r=listener), StepFrame((first,)))
    assert listener.heard == [first]


async def test_tokens_are_passed_on_in_slices_between_which_others_work() -> None:
    clock = Clock()
    listeners = {f"r{number}": Listener(clock, cost_s=MIN_SLICE_S / 4) for number in range(40)}
    entry, queue = entry_of("d1", **listeners), DeltaQueue(clock)
    queue.deal(entry, StepFrame(tuple(delta(name, 1) for name in listeners)))
    passed = []
    while not passed or passed[-1] < len(listeners):
        await asyncio.sleep(0)
        passed.append(sum(len(listener.heard) for listener in listeners.values()))
    steps = [after - before for before, after in zip([0, *passed], passed, strict=False)]
    assert all(3 <= step <= 5 for step in steps[:-1])
    assert all(listener.heard == [delta(name, 1)] for name, listener in listeners.items())


async def test_a_busy_loop_passes_more_on_in_a_slice_but_not_all() -> None:
    clock = Clock()
    listeners = {f"r{number}": Listener(clock, cost_s=0.001) for number in range(20)}
    entry, queue = entry_of("d1", **listeners), DeltaQueue(clock)
    clock.now += 10.0
    queue.deal(entry, StepFrame(tuple(delta(name, 1) for name in listeners)))
    await asyncio.sleep(0)
    assert sum(len(listener.heard) for listener in listeners.values()) == pytest.approx(MAX_SLICE_S / 0.001, abs=1)


async def test_a_failure_comes_behind_the_tokens_before_it_and_an_end_flushes() -> None:
    clock = Clock()
    one, two = Listener(clock), Listener(clock)
    entry, queue = entry_of("d1", one=one, two=two), DeltaQueue(clock)
    failure = AttemptFailed("one", 0, "server_error", "x")
    queue.deal(entry, StepFrame((delta("one", 1), delta("two", 1)), (failure,)))
    assert one.heard == [delta("one", 1), failure]
    assert two.heard == []
    queue.flush()
    assert two.heard == [delta("two", 1)]


async def test_two_nodes_with_one_request_keep_their_order() -> None:
    clock = Clock()
    listener = Listener(clock)
    queue, nodes = DeltaQueue(clock), [entry_of(name, r=listener) for name in ("d1", "d2")]
    queue.deal(nodes[0], StepFrame((delta("r", 1),)))
    queue.deal(nodes[1], StepFrame((delta("r", 2, attempt=1),)))
    queue.flush()
    assert listener.heard == [delta("r", 1), delta("r", 2, attempt=1)]


ROW = TokenLogprobs(5, -0.5, 1)
APART = {
    "another attempt": delta("r", 2, attempt=1),
    "a gap": delta("r", 3),
    "log-probabilities on one side": delta("r", 2, logprobs=(ROW,)),
    "an account": delta("r", 2, reuse=Reuse(1, computed=1)),
}


@pytest.mark.parametrize("second", APART.values(), ids=APART)
def test_deltas_that_do_not_go_on_stay_apart(second: TokenDelta) -> None:
    both = [delta("r", 1), second]
    assert joined(both) == both
    ended = [delta("r", 1, finish_reason="stop"), delta("r", 2)]
    assert joined(ended) == ended


def test_joined_deltas_have_all_tokens_and_the_last_ones_end() -> None:
    end: dict[str, Any] = {"finish_reason": "stop", "stop_token": 6}
    rows = [delta("r", 1, logprobs=(ROW,)), delta("r", 2, 5, 6, logprobs=(ROW, ROW), **end)]
    assert joined(rows) == (
        delta("r", 1, 1, 5, 6, logprobs=(ROW, ROW, ROW), **end),
    )  # fmt: skip


async def test_any_frames_give_each_listener_its_tokens_in_order() -> None:
    source, clock = random.Random(5), Clock()
    for _ in range(200):
        listeners = {name: Listener(clock, cost_s=source.choice((0.0, 0.001))) for name in "abc"}
        entry, queue = entry_of("d1", **listeners), DeltaQueue(clock)
        sent = dict.fromkeys("abc", 0)
        for _ in range(source.randint(1, 30)):
            deltas = []
            for name in source.choices("abc", k=source.randint(1, 5)):
                count = source.randint(1, 3)
                deltas.append(delta(name, sent[name], *range(sent[name], sent[name] + count)))
                sent[name] += count
            queue.deal(entry, StepFrame(tuple(deltas)))
            if source.random() < 0.3:
                await asyncio.sleep(0)
        queue.flush()
        for name, listener in listeners.items():
            assert [token for each in listener.heard for token in each.token_ids] == list(range(sent[name]))
