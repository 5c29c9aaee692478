"""JournaledOutputs: connects a generation to its journal: replays what is recorded and records new outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvferry.router.dispatch.interface import Dispatch, Output, RequestSpec
from kvferry.router.journal.errors import NotResumable
from kvferry.router.journal.open_journal import OpenJournal
from kvferry.router.journal.recorded_dispatch import FollowedJournal, RecordedDispatch
from kvferry.router.journal.recording import digest


class JournaledOutputs:
    """Journal of a generation. Implements router.api.generation.Journal.

    followed  recorded journal; None: the request is new
    written   receives new outputs; None: another router computes them
    computes  if false, only recorded outputs are shown, and nothing is computed
    """

    def __init__(self, followed: FollowedJournal | None) -> None:
        self.followed, self.computes = followed, True
        self.written: OpenJournal | None = None

    def check(self, prompts: Sequence[RequestSpec]) -> None:
        """Raise NotResumable if the prompts are not those whose tokens are recorded."""
        digested = digest(prompts)
        if self.followed is None and self.written is not None:
            self.written.pending.note_prompts(digested)
        elif self.followed is not None and self.followed.recording.prompts not in (b"", digested):
            raise NotResumable("the request's prompt has changed, for example since the chat template shows the date")

    def start(self, spec: RequestSpec, choice: int, compute: Callable[[RequestSpec], Dispatch]) -> Dispatch:
        """Return the dispatch of a choice."""
        if self.followed is None:
            return compute(spec)
        return RecordedDispatch(spec, choice, self.followed, compute if self.computes else None)

    def add(self, choice: int, output: Output) -> None:
        """Record an output; those that were replayed are recorded already."""
        if self.written is not None and not output.replayed:
            self.written.pending.add(choice, output)

    def bind(self, choice: int, dispatch: Dispatch) -> None:
        """Record where a choice is computed."""
        if self.written is not None:
            fork = dispatch.fork
            self.written.pending.bind(choice, dispatch.route, fork.fingerprint if fork else "")
