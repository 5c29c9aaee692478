"""JournaledRequest: one recorded request: new, resumed, or followed while another router serves it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from kvferry.protocol.errors import Cancelled, KvferryError
from kvferry.protocol.journal_metrics import JournalMetrics
from kvferry.router.api.admission import TokenUsage
from kvferry.router.journal.event_ids import StreamPosition
from kvferry.router.journal.journaled_outputs import JournaledOutputs
from kvferry.router.journal.open_journal import CloseMode, OpenJournal, nothing
from kvferry.router.journal.recorded_dispatch import FollowedJournal
from kvferry.router.journal.recording import JournalHead
from kvferry.router.journal.writer import JournalWriter
from kvferry.router.request_context import RequestContext


class JournaledRequest:
    """A recorded request, as one router serves it.

    call         its context, with the identity that was recorded
    after        position after which the client wants the stream to continue; None: from the beginning
    after_event  that position as an event number
    outputs      its recorded and new outputs
    is_lost      another router owns the journal now
    cancel       ends the generation; called when the journal is lost
    """

    def __init__(
        self, call: RequestContext, head: JournalHead, name: str, writer: JournalWriter, metrics: JournalMetrics,
        followed: FollowedJournal | None, ttl_s: float,
    ) -> None:  # fmt: skip
        self.call, self.head, self.name = call, head, name
        self.after: StreamPosition | None = None
        self.after_event = -1
        self.is_lost = False
        self.cancel: Callable[[], object] | None = None
        self._writer, self._metrics, self._ttl_s = writer, metrics, ttl_s
        self.outputs = JournaledOutputs(followed)
        self._keeps_open = False

    @property
    def is_resumed(self) -> bool:
        """Return whether another request began this journal."""
        return self.outputs.followed is not None

    @property
    def is_own(self) -> bool:
        """Return whether this router computes what is missing."""
        return self.outputs.followed is None or self.outputs.followed.is_own

    @property
    def has_ended(self) -> bool:
        """Return whether the whole answer is recorded."""
        return self.outputs.followed is not None and self.outputs.followed.recording.has_ended

    @property
    def recorded_tokens(self) -> int:
        """Return the number of recorded output tokens."""
        return self.outputs.followed.recording.tokens if self.outputs.followed is not None else 0

    def used(self, used: Callable[[], TokenUsage]) -> Callable[[], TokenUsage]:
        """Wrap `used`, which counts the answer's tokens, so that only those computed by this router count."""
        if self.outputs.followed is None:
            return used
        return lambda: TokenUsage(output=max(0, used().output - self.recorded_tokens) if self.is_own else 0)

    def on_claim(self, claimed: Callable[[], object]) -> None:
        """Await `claimed` when this router begins to compute a request that it only followed before."""

        async def own() -> None:
            self.write()
            await claimed()  # type: ignore[misc]

        if self.outputs.followed is not None:
            self.outputs.followed.claimed = own

    def write(self, written: OpenJournal | None = None) -> bool:
        """Record outputs computed from now on; return False if the journal is already too large."""
        if written is None:
            assert self.outputs.followed is not None
            recording = self.outputs.followed.recording
            written = OpenJournal(
                self.call.tenant, self.name, self._ttl_s, head=self.head.packed(), entries=recording.data,
                is_opened=True, key=self.call.resume.key, watched=self.head.watched,
            )  # fmt: skip
            self._metrics.takeovers.labels("response" if self.head.watched else "stream").inc()
        written.on_lost = self._lost
        self.outputs.written = written
        return self._writer.begin(written)

    def mirror_to(self, other: OpenJournal) -> None:
        """Record the outputs in another store, too."""
        assert self.outputs.written is not None
        other.on_lost = self._lost
        self.outputs.written.mirror_to(other)

    def keep_open(self) -> None:
        """Keep the journal open after the `with` block; the caller must call `close`."""
        self._keeps_open = True

    async def hand_over(self, within_s: float) -> None:
        """Release the journal to other routers; return once it is written, or after `within_s` seconds."""
        if self.outputs.written is not None:
            self._writer.close(self.outputs.written, CloseMode.RELEASE)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self.outputs.written.closed.wait()

    def close(self, error: BaseException | None = None) -> None:
        """Close the journal; after an error another router may continue it if tokens were delivered."""
        if self.outputs.written is None or self.outputs.written.close_mode is not None:
            return
        begun = self.outputs.written.pending.has_tokens or self.recorded_tokens
        if error is None:
            how = CloseMode.END
        elif begun or not isinstance(error, KvferryError) or isinstance(error, Cancelled):
            how = CloseMode.RELEASE
        else:
            how = CloseMode.DROP
        self._writer.close(self.outputs.written, how)

    def __enter__(self) -> JournaledRequest:
        if self.is_resumed:
            self._metrics.resumed.inc()
        return self

    def __exit__(self, kind: object, error: BaseException | None, *rest: object) -> None:
        if error is not None or not self._keeps_open:
            self.close(error)
            self.forget()

    def forget(self) -> None:
        """Drop references to the generation, so that no reference cycle is left to the garbage collector."""
        self.cancel = None
        if self.outputs.followed is not None:
            self.outputs.followed.claimed = None
        if self.outputs.written is not None:
            self.outputs.written.on_lost = nothing

    def _lost(self) -> None:
        self.is_lost = True
        if self.cancel is not None:
            self.cancel()
