"""Binary contents of a journal: the request as sent (JournalHead), and entries with the delivered tokens.

Tokens are recorded, not events: text, parsed calls, log-probabilities and ids follow from them and from the request."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.protocol.messages import TokenDelta
from kvferry.protocol.wire import WireError, pack, unpack
from kvferry.router.dispatch import jobs
from kvferry.router.dispatch.interface import Output, RequestSpec, Route
from kvferry.router.request_context import RequestIdentity

_TOKENS, _OUTPUT, _ROUTE, _PROMPTS, _END = range(5)
"""Kinds of items in an entry."""
_VERSION = 1


@dataclass(frozen=True, slots=True)
class JournalHead:
    """Request as sent by the client.

    id         of its answer's RequestContext
    timeout_s  seconds from its arrival to its deadline
    watched    other routers take it over without a client's request
    """

    path: str
    body: bytes
    id: str
    identity: RequestIdentity
    timeout_s: float
    watched: bool = False

    def packed(self) -> bytes:
        """Return the head as bytes."""
        own = self.identity
        return pack([
            _VERSION, self.path, self.body, self.id, own.nonce, own.created, own.seed, self.timeout_s, self.watched
        ])  # fmt: skip

    @classmethod
    def unpacked(cls, data: bytes) -> JournalHead:
        """Parse the result of `packed`. Raises WireError."""
        value = unpack(data)
        if not isinstance(value, list) or len(value) != 9 or value[0] != _VERSION:
            raise WireError("the journal's head is of another version")
        _, path, body, name, nonce, created, seed, timeout_s, watched = value
        return cls(path, body, name, RequestIdentity(nonce, created, seed), timeout_s, watched)

    def is_of(self, path: str, body: bytes) -> bool:
        """Return whether the recorded request had this path and body."""
        return self.path == path and self.body == body


class PendingEntry:
    """Outputs of one request that are not written yet; they become the journal's next entry."""

    __slots__ = ("_items", "_open", "has_tokens")

    def __init__(self) -> None:
        self._items: list[tuple[int, int, object]] = []
        self._open: dict[int, list[int]] = {}
        """Token lists that can still grow, by choice."""
        self.has_tokens = False

    def __bool__(self) -> bool:
        return bool(self._items)

    def add(self, choice: int, output: Output) -> None:
        """Record an output of a choice."""
        if output.finish_reason is None and output.logprobs is None and output.prompt_logprobs is None:
            tokens = self._open.get(choice)
            if tokens is None:
                self.has_tokens = True
                tokens = self._open[choice] = []
                self._items.append((_TOKENS, choice, tokens))
            tokens += output.token_ids
            return
        self._open.pop(choice, None)
        self.has_tokens = True
        delta = TokenDelta(
            "", 0, 0, output.token_ids, output.logprobs, output.finish_reason, output.stop_token,
            prompt_logprobs=output.prompt_logprobs,
        )  # fmt: skip
        self._items.append((_OUTPUT, choice, delta))

    def bind(self, choice: int, route: Route | None, fingerprint: str) -> None:
        """Record where a choice was computed."""
        nodes = (route.prefill, route.decode, route.reuse, route.late) if route else None
        self._items.append((_ROUTE, choice, (nodes, fingerprint)))

    def note_prompts(self, digest: bytes) -> None:
        """Record the digest of the prompts' tokens."""
        self._items.append((_PROMPTS, 0, digest))

    def end(self) -> None:
        """Record that the answer is complete."""
        self._items.append((_END, 0, None))

    def take(self) -> bytes:
        """Return all items as an entry, and begin the next entry."""
        entry = pack(self._items)
        self._items, self._open = [], {}
        return entry


@dataclass(slots=True)
class RecordedChoice:
    """Recorded outputs and route of one choice."""

    outputs: list[Output] = field(default_factory=list)
    route: Route | None = None
    fingerprint: str = ""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return all recorded output tokens."""
        return tuple(token for output in self.outputs for token in output.token_ids)


@dataclass(slots=True)
class Recording:
    """Entries of a journal. `prompts` is the digest of the prompts; `data` are the entries as stored."""

    choices: defaultdict[int, RecordedChoice] = field(default_factory=lambda: defaultdict(RecordedChoice))
    prompts: bytes = b""
    has_ended: bool = False
    data: list[bytes] = field(default_factory=list)

    @property
    def entries(self) -> int:
        """Return the number of entries."""
        return len(self.data)

    def add(self, entries: Sequence[bytes]) -> None:
        """Add entries. Raises WireError."""
        for entry in entries:
            for kind, choice, value in unpack(entry):
                self._apply(kind, self.choices[choice], value)
            self.data.append(entry)

    def renew(self, entries: Sequence[bytes]) -> None:
        """Replace the entries by those of the same journal written again; keep them if those hold less as yet.

        Raises WireError. Outputs that are known keep their places, since both journals have them in the same order."""
        again = Recording()
        again.add(entries)
        if again.has_ended < self.has_ended or any(
            len(again.choices[choice].outputs) < len(each.outputs) for choice, each in self.choices.items()
        ):
            return
        for choice, each in again.choices.items():
            mine = self.choices[choice]
            mine.outputs += each.outputs[len(mine.outputs) :]
            mine.route, mine.fingerprint = each.route, each.fingerprint
        self.prompts, self.has_ended, self.data = again.prompts, again.has_ended, again.data

    @property
    def tokens(self) -> int:
        """Return the number of recorded output tokens."""
        return sum(len(output.token_ids) for each in self.choices.values() for output in each.outputs)

    def _apply(self, kind: int, choice: RecordedChoice, value: object) -> None:
        match kind, value:
            case 0, list():
                choice.outputs.append(Output(tuple(value), replayed=True))
            case 1, TokenDelta():
                output = jobs.output(value)
                output.replayed = True
                choice.outputs.append(output)
            case 2, [nodes, str(fingerprint)]:
                route = Route(*nodes) if isinstance(nodes, list) else None
                choice.route, choice.fingerprint = route, fingerprint
            case 3, bytes():
                self.prompts = value
            case 4, _:
                self.has_ended = True


def digest(prompts: Sequence[RequestSpec]) -> bytes:
    """Return a digest of the prompts' tokens, which shows whether a prompt that is rendered again has changed.

    A chat template may show the time, or may itself have changed."""
    hasher = hashlib.blake2b(digest_size=16)
    for spec in prompts:
        hasher.update(pack(spec.token_ids))
    return hasher.digest()
