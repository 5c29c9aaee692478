"""The engine's news: who hears it, on which thread, in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvferry.engine.events import Admitted, BlocksChanged, Computed, Event, Stepped
from kvferry.protocol.lease import Rates
from kvferry.protocol.messages import CancelRequest
from kvferry.protocol.worker_metrics import WorkerMetrics
from kvferry.worker.event_relay import EventRelay
from kvferry.worker.rates import RateMeter

EVENTS: list[Event] = [
    Computed(1, ((0, 7),)),
    Admitted(("a", 0), 0.5, 40, 16),
    BlocksChanged({b"new": b"new row"}, {b"old": b"old row"}),
    Stepped(0.25, prefill_tokens=40, decode_tokens=0, preempted=0, evicted=2),
]


class Recorder:
    """A service, a loop and an index that write down what they are told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.soon: list[Callable[[], None]] = []
        self.broken = False
        self.metrics = WorkerMetrics("prefill")
        self.rates = RateMeter(Rates(prefill_tokens_per_s=60.0))
        self.news = EventRelay(self, self.metrics, self.rates, self.note, self.call_soon)

    def to_link(self, events: Sequence[Event]) -> None:
        self.told.append("link")
        if self.broken:
            raise OSError("the link is closed")

    def to_routers(self, events: Sequence[Event]) -> None:
        self.told.append("routers")

    def note(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        self.told.append("index")

    def call_soon(self, call: Callable[[], None]) -> None:
        self.told.append("loop")
        self.soon.append(call)

    def cancel(self, cancel: CancelRequest) -> None: ...

    def busy(self) -> bool:
        return False

    def router_lost(self, router_id: str) -> None: ...

    def stop(self) -> None: ...


def test_the_loop_is_told_before_the_link_which_does_not_wait_for_it() -> None:
    recorder = Recorder()
    recorder.news.take(EVENTS)
    assert recorder.told == ["loop", "link"]
    recorder.soon.pop()()
    assert recorder.told == ["loop", "link", "routers", "index"]
    assert recorder.metrics.step_tokens["prefill"]._value.get() == 40
    assert recorder.metrics.evictions._value.get() == 2
    assert recorder.metrics.prefix_hits._value.get() == 16
    assert recorder.rates.rates.prefill_tokens_per_s == 70.0


def test_a_link_that_raises_does_not_end_the_engine_thread() -> None:
    recorder = Recorder()
    recorder.broken = True
    recorder.news.take(EVENTS)
    assert len(recorder.soon) == 1
