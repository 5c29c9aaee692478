"""LocalEmbeddings: media embeddings of this process, from a cache and one thread that runs the model's encoder.

The thread takes one item at a time, so that the bits of its rows do not depend on other items, and takes roots
(tenants) in turn. Requests for the same item share its computation. The thread gives way to
the engine's steps on shared cores."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from kvferry.engine.media.embedding_cache import EmbeddingCache, Key
from kvferry.engine.media.encoder import MediaEncoder, Ready
from kvferry.protocol.errors import DeadlineExceeded, Overloaded, StepFailed
from kvferry.protocol.media import MediaItem
from kvferry.protocol.messages import DecodeTarget
from kvferry.runtime.thread_priority import lower_priority

log = logging.getLogger("kvferry.engine")

MAX_QUEUED = 512
"""Items that may wait for the encoder. One root (a tenant) may use half of the places that other roots leave free."""
NICENESS = 5
"""Niceness of the thread, in steps: beside a busy engine thread on one core it gets a quarter of the time."""
STOP_S = 5.0
"""Longest wait for the thread's present item when the node ends, in seconds."""
Observe = Callable[[MediaItem, str, float], None]
"""Called on any thread with an item, an outcome (encoded, cached, failed) and the seconds that it took."""


@dataclass(slots=True, eq=False)
class _Call:
    """One call of `submit`. rows: those that are here, by place. settled: `ready` was called, or it was cancelled."""

    ready: Ready
    keys: list[Key]
    deadline: float
    rows: dict[int, torch.Tensor] = field(default_factory=dict)
    settled: bool = False

    @property
    def open(self) -> bool:
        return not self.settled and time.monotonic() < self.deadline

    @property
    def outcome(self) -> list[torch.Tensor]:
        return [self.rows[place] for place in range(len(self.keys))]

    def ends(self) -> bool:
        """Return whether `ready` is to be called now; true only once. The caller holds the lock."""
        was_settled, self.settled = self.settled, True
        return not was_settled

    def resolve(self, outcome: list[torch.Tensor] | Exception) -> None:
        """Call `ready`; log any exception, since the thread must serve other calls."""
        try:
            self.ready(outcome)
        except Exception:
            log.exception("delivering the embeddings of media to a request failed")


@dataclass(slots=True, eq=False)
class _Work:
    """One item to encode, and the calls that need it, each with the item's place in the call."""

    item: MediaItem
    callers: list[tuple[_Call, int]]


class LocalEmbeddings:
    """Implements `EmbeddingSource` with an encoder of this process.

    cache_bytes: of rows that are kept. encoded: items encoded so far. device: on which the encoder computes."""

    def __init__(self, encoder: MediaEncoder, cache_bytes: int, device: torch.device) -> None:
        self.encoded = self._taken = 0
        self.observe: Observe = lambda item, outcome, seconds: None
        self._encoder, self._device, self._cache = encoder, device, EmbeddingCache(cache_bytes)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queues: OrderedDict[bytes, deque[Key]] = OrderedDict()
        self._works: dict[Key, _Work] = {}
        self._thread: threading.Thread | None = None
        self._busy = self._stopped = False

    @property
    def cached_bytes(self) -> int:
        """Return the bytes of the rows that are kept."""
        return self._cache.bytes

    @property
    def waiting(self) -> int:
        """Return the items that wait for the encoder or are in it."""
        return len(self._works)

    @property
    def mark(self) -> int | None:
        """Return a number that changes with each item; None while the thread is idle. From any thread."""
        return self._taken if self._busy else None

    def submit(
        self,
        root: bytes,
        items: Sequence[MediaItem],
        ready: Ready,
        deadline_s: float,
        encoder: DecodeTarget | None = None,
    ) -> Callable[[], None]:
        """See `EmbeddingSource`. Raises Overloaded if too many items wait, of all or of this root."""
        call = _Call(ready, [(root, item.hash) for item in items], time.monotonic() + deadline_s)
        cached: list[MediaItem] = []
        with self._lock:
            self._admit(root, call.keys)
            for place, (key, item) in enumerate(zip(call.keys, items, strict=True)):
                if (rows := self._cache.get(key)) is not None:
                    call.rows[place] = rows
                    cached.append(item)
                else:
                    self._queue(key, item, call, place)
            whole = len(cached) == len(items) and call.ends()
        for item in cached:
            self._observed(item, "cached", 0.0)
        if whole:
            call.resolve(call.outcome)
        return lambda: self._cancel(call)

    def stop(self) -> None:
        """End the thread after its present item; calls that wait get no answer any more."""
        with self._lock:
            self._stopped = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(STOP_S)

    def _admit(self, root: bytes, keys: Sequence[Key]) -> None:
        """Raise Overloaded if a root's items would take more than its share of the queue. The caller holds the lock."""
        own = len(self._queues.get(root, ()))
        others = len(self._works) - own
        new = sum(key not in self._works and key not in self._cache for key in {*keys})
        if new and own + new > (MAX_QUEUED - others) // 2:
            raise Overloaded(f"{len(self._works)} images or audios wait for the encoder", retry_after=1.0)

    def _queue(self, key: Key, item: MediaItem, call: _Call, place: int) -> None:
        if (work := self._works.get(key)) is not None:
            work.callers.append((call, place))
            return
        self._works[key] = _Work(item, [(call, place)])
        self._queues.setdefault(key[0], deque()).append(key)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="media-encoder", daemon=True)
            self._thread.start()
        self._changed.notify()

    def _cancel(self, call: _Call) -> None:
        """Forget a call, and the items that wait for it alone."""
        with self._lock:
            call.settled = True
            for key in call.keys:
                waiting, work = self._queues.get(key[0], ()), self._works.get(key)
                if work is None or key not in waiting or any(not other.settled for other, _ in work.callers):
                    continue
                del self._works[key]
                self._queues[key[0]].remove(key)
                if not self._queues[key[0]]:
                    del self._queues[key[0]]

    def _observed(self, item: MediaItem, outcome: str, seconds: float) -> None:
        try:
            self.observe(item, outcome, seconds)
        except Exception:
            log.exception("updating the metrics of encoded media failed")

    def _run(self) -> None:
        lower_priority(NICENESS)
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        while (key := self._next()) is not None:
            item, began = self._works[key].item, time.monotonic()
            outcome = self._encode(item, stream)
            ended = self._settle(key, outcome)
            label = "failed" if isinstance(outcome, Exception) else "encoded"
            self._observed(item, label, time.monotonic() - began)
            for call in ended:
                call.resolve(outcome if isinstance(outcome, Exception) else call.outcome)

    def _next(self) -> Key | None:
        """Wait for an item that some call still needs; None: stop. Its root goes to the end of the queue."""
        while True:
            with self._lock:
                self._busy = False
                while not self._queues and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return None
                self._busy = True
                root, keys = self._queues.popitem(last=False)
                key = keys.popleft()
                if keys:
                    self._queues[root] = keys
                if any(call.open for call, _ in self._works[key].callers):
                    self._taken += 1
                    return key
                late = [call for call, _ in self._works.pop(key).callers if call.ends()]
            for call in late:
                call.resolve(DeadlineExceeded("the media were not encoded in time"))

    @torch.inference_mode()
    def _encode(self, item: MediaItem, stream: torch.cuda.Stream | None) -> torch.Tensor | Exception:
        """Return the computed rows of an item, or the encoder's exception."""
        try:
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                (rows,) = self._encoder.encode([item])
                if stream is not None:
                    stream.synchronize()
            if rows.shape != (item.length, self._encoder.width):
                raise StepFailed(f"the encoder made rows of shape {tuple(rows.shape)} for {item.length} tokens")
            return rows
        except Exception as error:
            return error

    def _settle(self, key: Key, outcome: torch.Tensor | Exception) -> list[_Call]:
        """Keep an item's rows; return the calls that wait for nothing else."""
        with self._lock:
            callers, ended = self._works.pop(key).callers, []
            if isinstance(outcome, torch.Tensor):
                self.encoded += 1
                self._cache.put(key, outcome)
            for call, place in callers:
                if isinstance(outcome, torch.Tensor):
                    call.rows[place] = outcome
                if (isinstance(outcome, Exception) or len(call.rows) == len(call.keys)) and call.ends():
                    ended.append(call)
        return ended
