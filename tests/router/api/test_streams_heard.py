"""Streams whose tokens pass by the dispatch's mail are, byte for byte, those whose tokens are iterated."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from kvferry.placement.types import NodeKey, Placement
from kvferry.protocol.errors import FatalRequest, NodeLost
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.messages import Job, TokenDelta
from kvferry.protocol.prefix_reuse import Reuse
from kvferry.router.api.bodies.generating import GenerationBody
from kvferry.router.api.formats.chunks import ChunkAnswer
from kvferry.router.api.sequence_stream import Choice
from kvferry.router.dispatch.dispatch import RequestDispatch
from kvferry.router.dispatch.events import Event
from kvferry.router.dispatch.failures import Failure
from kvferry.router.dispatch.interface import RequestSpec
from kvferry.router.dispatch.pending_requests import PendingRequests
from kvferry.router.text.transcript import Piece
from kvferry.runtime.log import JsonFormatter
from tests.api_parts import EOS, MESSAGES, Api, FakeCluster, ids_of, logprobs_of
from tests.waiting import until

TEXT = "Once upon a time there were little 🦊🦊🦊 who read <b>books</b> (naïve, 日本語), and nothing else. 👩‍🚒 end"
NODE = NodeLease("d", "decode", 1, "ready", "http://d", "d:1", "f", "m", 4096, 16, 1)
CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"
Asked = tuple[str, dict[str, Any]]
BODIES: list[Asked] = [
    (CHAT, {}),
    (CHAT, {"logprobs": True, "top_logprobs": 2}),
    (CHAT, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    (CHAT, {"stop": ["books"]}),
    (CHAT, {"n": 2}),
    (CHAT, {"n": 4, "stop": [" (na", "🦊🦊"], "stream_options": {"include_usage": True}}),
    (TEXTS, {"prompt": ["Hi", "Ho", "Hu"], "n": 2, "stop": "语", "logprobs": 1}),
    (TEXTS, {"max_tokens": 9}),
    (TEXTS, {"return_token_ids": True}),
    ("/v1/responses", {}),
    ("/v1/messages", {"max_tokens": 64}),
]
SEVERAL_PROMPTS = next(at for at, (_, body) in enumerate(BODIES) if "prompt" in body)
"""Which of BODIES; how many tokens one event of its answers has is chance."""


class Attempt:
    """A node's work on a job: deltas cut anyhow, some twice, early or of others, and perhaps an error."""

    def __init__(self, job: Job, post: Callable[[Event], None], dice: random.Random, fails: bool) -> None:
        self.job, self.placement, self.decoding, self.age_s = job, Placement(None, NODE, 0, 0.0, 0.0), True, 0.0
        self.suspects, self.ships = frozenset[NodeKey](), False
        self.cancelled: bool | None = None
        self._post, self._dice = post, dice
        self._task = asyncio.create_task(self._run(self._events(fails)))

    def close(self, *, cancel: bool) -> None:
        if self.cancelled is None:
            self.cancelled = cancel
            self._task.cancel()

    async def _run(self, events: list[Event]) -> None:
        for event in events:
            for _ in range(self._dice.choice((0, 0, 0, 1, 2, 5, 9))):
                await asyncio.sleep(0)
            self._post(event)

    def _events(self, fails: bool) -> list[Event]:
        dice, job, params = self._dice, self.job, self.job.work.params  # type: ignore[union-attr]
        ids = [*ids_of(TEXT), EOS][: params.max_tokens]
        at, found = len(job.token_ids) - job.prompt_len, list[Event]()
        while at < len(ids):
            some = tuple(ids[at : at + dice.choice((1, 1, 1, 2, 4))])
            last = at + len(some) == len(ids)
            stop = EOS if last and some[-1] == EOS else None
            found.append(
                TokenDelta(
                    job.request_id, job.attempt, at, some, logprobs_of(some, params.logprobs),
                    (("length" if stop is None else "stop") if last else None), stop,
                    Reuse(job.prompt_len, computed=job.prompt_len) if not found else None,
                )
            )  # fmt: skip
            at += len(some)
        for _ in range(dice.choice((0, 0, 1, 3))):
            place = dice.randrange(len(found))
            found.insert(dice.randint(place, len(found)), found[place])
        for place in range(len(found) - 1):
            if dice.random() < 0.05:
                found[place], found[place + 1] = found[place + 1], found[place]
        if fails:
            error = FatalRequest("no more") if dice.random() < 0.2 else NodeLost("gone")
            found[dice.randrange(len(found)) :] = [Failure(job.attempt, error, (NODE,), frozenset({"decode"}))]
        return found


class Nodes(FakeCluster):
    """Real dispatches over such attempts. heard: somebody may listen to them."""

    def __init__(self, seed: int, heard: bool) -> None:
        super().__init__(lambda spec: ())
        self.attempts: list[Attempt] = []
        self.passed = 0
        self._seed, self._heard = seed, heard

    def start(self, spec: RequestSpec) -> Any:
        context = MagicMock(group=SimpleNamespace(members=(), name=SimpleNamespace(first="m")), max_wait_s=1.0)
        context.held, context.deaths.any, context.reuse = PendingRequests(), False, AsyncMock(return_value={})
        context.place.return_value = Placement(None, NODE, 0, 0.0, 0.0)
        context.account.side_effect = lambda told, job, node: told
        context.launch.side_effect = self._launch
        dispatch = RequestDispatch(spec, context)
        if not self._heard:
            dispatch.listen = lambda listener: None  # type: ignore[method-assign]
        return dispatch

    def _launch(self, job: Job, placement: Placement, post: Callable[[Event], None], hashes: Any = ()) -> Attempt:
        dice = random.Random(f"{self._seed} {job.request_id.rpartition('-')[0]} {job.attempt}")
        fails = job.attempt < 2 and dice.random() < 0.3
        self.attempts.append(Attempt(job, post, dice, fails))
        return self.attempts[-1]


class Client:
    """Reads at its own pace; leaves, breaks the next write, or is stuck, after so many writes."""

    def __init__(self, dice: random.Random, leaves: int, breaks: int) -> None:
        self.written, self.writes, self.left = b"", 0, asyncio.Event()
        self._dice, self._leaves, self._breaks = dice, leaves, breaks
        self._asked: list[bytes] = []
        self.stuck_after, self.passed = 10**9, 0

    async def answer(self, api: Api, path: str, body: dict[str, Any]) -> None:
        prompt = {"messages": MESSAGES} if path in (CHAT, "/v1/messages") else {"prompt": "Hi"}
        prompt = {"input": "Hi"} if path == "/v1/responses" else prompt
        self._asked = [json.dumps({"stream": True, "seed": 1, **prompt, **body}).encode()]
        headers = [(b"x-request-id", b"the-one-request"), (b"content-type", b"application/json")]
        scope = {
            "type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b"", "client": None,
            "http_version": "1.1", "raw_path": path.encode(), "root_path": "", "scheme": "http",
        }  # fmt: skip
        await api.app(scope, self._receive, self._send)

    async def _receive(self) -> Any:
        if self._asked:
            return {"type": "http.request", "body": self._asked.pop(), "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    def write_chunk(self, data: bytes) -> bool:
        """Take plain text past `_send`, as `ResponseCycle` does, unless this client is about to leave or is behind."""
        last = min(self._leaves, self._breaks, self.stuck_after) - 1
        if self.left.is_set() or self.writes >= last or self._dice.random() < 0.3:
            return False
        self.writes, self.written, self.passed = self.writes + 1, self.written + data, self.passed + 1
        return True

    async def _send(self, message: Any) -> None:
        if message["type"] != "http.response.body" or self.left.is_set():
            return
        self.writes += 1
        if self.writes == self._leaves:
            self.left.set()
            return
        if self.writes >= self._breaks:
            raise ConnectionError("no such socket")
        for _ in range(self._dice.choice((0, 0, 0, 0, 1, 3, 20))):
            await asyncio.sleep(0)
        if self.writes > self.stuck_after:
            await self.left.wait()
        if self.left.is_set():
            return
        self.written += message["body"]


async def answered(
    seed: int, heard: bool, asked: Asked | None = None, leaves: int = 10**9, breaks: int = 10**9
) -> tuple[bytes, Nodes]:
    nodes = Nodes(seed, heard)
    client = Client(random.Random(seed), leaves, breaks)
    path, body = asked or BODIES[seed % len(BODIES)]
    try:
        await asyncio.wait_for(client.answer(Api(nodes), path, body), 20)
    except ConnectionError:
        assert client.writes >= breaks
    nodes.passed = client.passed
    return re.sub(rb'("created(_at)?"|"completed_at"): ?[\d.]+|the-one-request-\w+', b"", client.written), nodes


@pytest.mark.parametrize("seed", range(22))
async def test_a_stream_is_the_same_whether_heard_or_iterated(seed: int) -> None:
    await compare(seed, BODIES[seed % len(BODIES)])


@pytest.mark.parametrize("seed", range(24))
async def test_choices_that_end_at_any_stops_are_the_same_whether_heard_or_iterated(seed: int) -> None:
    dice = random.Random(seed)
    starts = [dice.randrange(len(TEXT)) for _ in range(dice.choice((0, 1, 1, 3)))]
    stops = ["nowhere", "the end of it", *(TEXT[at : at + dice.randint(1, 9)] for at in starts)]
    own = {"prompt": dice.choice(("Hi", ["Hi", "Ho"])), "best_of": 4} if seed % 3 == 0 else {"n": seed % 8 + 1}
    body = {"stop": dice.sample(stops, len(stops))[:4], "include_stop_str_in_output": dice.random() < 0.3, **own}
    await compare(seed, (TEXTS if "prompt" in own else CHAT, {**body, "stream": "best_of" not in own}))


async def test_plain_text_passes_by_pieces_and_messages() -> None:
    passed = [(await answered(seed, True, BODIES[0]))[1].passed for seed in range(8)]
    assert sum(passed) > 0
    assert not (await answered(11, True, BODIES[1]))[1].passed, "log-probabilities need pieces"


async def compare(seed: int, asked: Asked) -> None:
    heard, nodes = await answered(seed, True, asked)
    iterated, _ = await answered(seed, False, asked)
    assert len(heard) > 80
    assert b"not_found" not in heard
    assert b"invalid" not in heard
    if b'"error"' in heard and "n" in asked[1]:  # how much the other choices had told by then is chance
        assert events(heard)[-2:] == events(iterated)[-2:]
    elif isinstance(asked[1].get("prompt"), list):  # as is how many tokens of each prompt one event has
        assert texts(heard) == texts(iterated)
    else:
        assert events(heard) == events(iterated)
    await until(lambda: all(attempt.cancelled is not None for attempt in nodes.attempts))


@pytest.mark.parametrize("seed", range(9))
@pytest.mark.parametrize("how", ["leaves", "breaks"])
async def test_nodes_drop_the_stream_of_a_client_that_is_gone(seed: int, how: str) -> None:
    whole, _ = await answered(seed, False)
    at = random.Random(seed).randint(1, 6)
    end: dict[str, Any] = {how: at}
    some, nodes = await answered(seed, True, **end)
    if seed != SEVERAL_PROMPTS:
        assert all(event in events(whole) for event in events(some))
    await until(lambda: all(attempt.cancelled is not None for attempt in nodes.attempts))


async def test_choices_end_at_stops_although_their_client_does_not_read() -> None:
    nodes, client = Nodes(2, True), Client(random.Random(2), 10**9, 10**9)
    client.stuck_after = 2
    asking = asyncio.create_task(client.answer(Api(nodes), CHAT, {"n": 4, "stop": "books"}))
    await until(lambda: len(nodes.attempts) >= 4 and all(attempt.cancelled for attempt in nodes.attempts))
    assert b"books" not in client.written
    assert not asking.done()
    client.left.set()
    await asking


class Lines(logging.Handler):
    """What is logged, as the router's log has it."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[dict[str, str]] = []
        self.setFormatter(JsonFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        self.all.append(json.loads(self.format(record)))


@pytest.mark.parametrize("choices", [1, 3])
async def test_what_breaks_while_a_token_is_heard_is_logged_with_its_request(
    choices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = asyncio.current_task()

    def broken(answer: ChunkAnswer, choice: Choice, piece: Piece) -> bytes:
        if asyncio.current_task() is not asking:
            raise ValueError("no event for that")
        return b"event"

    monkeypatch.setattr(ChunkAnswer, "events", broken)
    logging.getLogger().addHandler(lines := Lines())
    try:
        client = Client(random.Random(0), 10**9, 10**9)
        await client.answer(Api(nodes := Nodes(1, True)), CHAT, {"n": choices})
    finally:
        logging.getLogger().removeHandler(lines)
    (line,) = [line for line in lines.all if "no event" in line.get("error", "")]
    assert line["request_id"] == "the-one-request"
    assert all(attempt.cancelled is not None for attempt in nodes.attempts)


def events(body: bytes) -> list[bytes]:
    """In order, choice by choice: which of them comes first is for their nodes to say."""
    found = body.split(b"\n\n")
    if b"chat.completion" not in body and b"text_completion" not in body:
        return found
    index = [re.search(rb'"index":(\d+)', event) for event in found]
    order = sorted(range(len(found)), key=lambda at: int(index[at][1]) if index[at] else 99)  # type: ignore[index]
    return [found[at] for at in order]


def texts(body: bytes) -> list[Any]:
    """Of each choice its text, tokens with their logprobs and end, however the events divided them; the last event."""
    found: dict[int, list[Any]] = {}
    *told, end = [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event]
    for event in told:
        for choice in json.loads(event.replace(b'",,"', b'","'))["choices"] if b'"choices"' in event else ():
            whole = found.setdefault(choice["index"], ["", [], [], None])
            logprobs = choice["logprobs"] or {"tokens": [], "token_logprobs": []}
            whole[0] += choice["text"]
            whole[1] += logprobs["tokens"]
            whole[2] += logprobs["token_logprobs"]
            whole[3] = choice["finish_reason"] or whole[3]
    return [*sorted(found.items()), end]


@pytest.mark.parametrize("asked", [BODIES[0], BODIES[7], BODIES[2]])
async def test_a_stream_that_has_begun_keeps_no_body(asked: Asked) -> None:
    class Counting(Client):
        async def _send(self, message: Any) -> None:
            await super()._send(message)
            bodies.append(sum(isinstance(each, GenerationBody) for each in gc.get_objects()))

    bodies = list[int]()
    gc.collect()
    before = sum(isinstance(each, GenerationBody) for each in gc.get_objects())
    await Counting(random.Random(1), 10**9, 10**9).answer(Api(Nodes(11, True)), *asked)
    assert len(bodies) > 3
    assert bodies[2:] == [before] * len(bodies[2:])
