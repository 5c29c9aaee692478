"""What a picker refuses, in the shape of the API, and how it counts what tenants use."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.protocol.lease import Load
from kvferry.router.tenants.keys import entry
from tests.endpoint_picker.gateway import House, at, chat, completion, engine
from tests.waiting import until

FULL = Load(running_requests=9, active_blocks=4010, total_blocks=1000)
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"

BAD: list[tuple[Any, str, str | None]] = [
    (b"{", CHAT, None),
    (b"[]", CHAT, None),
    (b"", COMPLETION, None),
    ({"model": "m"}, CHAT, "messages"),
    ({"messages": []}, CHAT, "messages"),
    ({"messages": [{"content": "x"}]}, CHAT, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, CHAT, "messages[0].content"),
    (chat(model=5), CHAT, "model"),
    (chat(max_tokens=-1), CHAT, "max_tokens"),
    (chat(n=0), CHAT, "n"),
    (chat(cache_salt=""), CHAT, "cache_salt"),
    ({"model": "m"}, COMPLETION, "prompt"),
    (completion({}), COMPLETION, "prompt"),
    (completion([1, 2**40]), COMPLETION, "prompt"),
    (completion([-1]), COMPLETION, "prompt"),
    (completion("word " * 9000), COMPLETION, "prompt"),
]


@pytest.mark.parametrize(("body", "path", "field"), BAD, ids=lambda each: str(each)[:40])
async def test_a_bad_body_names_the_field(body: Any, path: str, field: str | None) -> None:
    async with House(engine("e1")) as house:
        answer = await house.ask(body, path)
        assert answer.status == 400, answer
        assert answer.error["param"] == field
        assert answer.error["type"] == "invalid_request_error"
        assert answer.headers["content-type"] == "application/json"


async def test_what_only_the_engine_reads_is_placed_all_the_same() -> None:
    """Images, tools of other kinds, roles and fields that the router's API refuses; other APIs; no JSON at all."""
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}
    bodies: list[tuple[Any, str]] = [
        ({"messages": [image]}, CHAT),
        (chat(tools=[{"type": "custom", "custom": {"name": "x"}}]), CHAT),
        ({"messages": [{"role": "sage", "content": "x"}]}, CHAT),
        (chat(temperature=99, logit_bias="odd", audio={}), CHAT),
        ({"model": "m", "input": "text"}, "/v1/embeddings"),
        ({"input": [1]}, "/v1/responses"),
        (b"\x00\x01--boundary", "/v1/audio/transcriptions"),
    ]
    async with House(engine("e1")) as house:
        for body, path in bodies:
            assert await house.complete(body, path) == at("e1")


async def test_unknown_models_and_content_encodings() -> None:
    async with House(engine("e1")) as house:
        for path in (CHAT, "/v1/embeddings"):
            answer = await house.ask(chat(model="other"), path)
            assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        answer = await house.ask(chat(), headers={"content-encoding": "gzip"})
        assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")


async def test_anthropic_s_paths_have_anthropic_s_errors() -> None:
    async with House() as house:
        stream = house.stream()
        await stream.head("/v1/messages")
        await stream.body(b"{}", last=True)
        body = json.loads((await stream.read()).immediate_response.body)
        assert body["type"] == "error"
        assert body["error"]["type"] != "invalid_request_error"


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_that_is_too_long_is_refused_before_it_ends(declared: bool) -> None:
    async with House(engine("e1"), max_body_mib=1) as house:
        stream = house.stream()
        await stream.head(headers={"content-length": str(2**21)} if declared else {})
        if not declared:
            for _ in range(5):
                await stream.body(b"x" * 2**18, last=False)
        answer = await stream.answered()
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")


async def test_a_body_that_stops_coming_is_refused() -> None:
    async with House(engine("e1"), body_timeout=0.1) as house:
        stream = house.stream()
        await stream.head()
        await stream.body(b"{", last=False)
        answer = await stream.answered()
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")


async def test_without_a_node_it_waits_and_then_says_503() -> None:
    async with House(queue_timeout=0.3) as house:
        answer = await house.ask(chat())
        assert (answer.status, answer.error["code"]) == (503, "no_nodes")
        assert answer.headers["retry-after"] == "2"


async def test_a_node_that_comes_in_time_takes_the_request() -> None:
    async with House(engine("e1"), queue_timeout=30.0) as house:
        await house.announce("e1", state="draining")
        await until(lambda: house.nodes.entries["e1", 1].drains)
        waiting = asyncio.ensure_future(house.complete(chat()))
        await until(lambda: house.picker.cluster.held.requests == 1)
        await house.announce("e1", state="ready")
        assert await waiting == at("e1")
        assert house.picker.cluster.held.requests == 0


async def test_full_engines_are_a_429() -> None:
    async with House(engine("e1", load=FULL), queue_timeout=0.2) as house:
        answer = await house.ask(chat())
        assert (answer.status, answer.error["code"], answer.error["type"]) == (429, "overloaded", "rate_limit_error")
        assert int(answer.headers["retry-after"]) >= 1


async def test_too_many_requests_in_progress_are_a_429() -> None:
    async with House(engine("e1"), max_inflight=2) as house:
        first, second = await house.ask(chat()), await house.ask(chat())
        third = await house.ask(chat())
        assert (third.status, third.headers["retry-after"]) == (429, "1")
        await first.stream.respond()
        assert await house.complete(chat()) == at("e1")
        await second.stream.respond()


async def test_the_fair_queue_begins_the_next_when_a_response_ends_and_refuses_what_is_too_much() -> None:
    """The engine runs one sequence, and with one tenant a second waits on it: the third waits here, the fourth is one
    too many."""
    async with House(engine("e1", max_num_seqs=1), max_queued=1) as house:
        running = [await house.ask(chat()) for _ in range(2)]
        waiting = asyncio.ensure_future(house.ask(chat()))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        refused = await house.ask(chat())
        assert (refused.status, refused.error["code"]) == (429, "overloaded")
        await running[0].stream.respond()
        assert (await waiting).endpoints == [at("e1")]
        for each in (running[1], await waiting):
            await each.stream.respond()


async def test_a_response_that_passes_its_deadline_is_cut() -> None:
    async with House(engine("e1"), request_timeout=0.5) as house:
        answer = await house.ask(chat())
        await answer.stream.begin()
        with pytest.raises(Exception, match="passed its deadline"):
            await answer.stream.read()


class Tenants:
    """Two tenants with keys, in a file for --api-keys."""

    def __init__(self, folder: Path, **limits: int) -> None:
        self.path = folder / "keys.toml"
        lines = "".join(f"{name} = {value}\n" for name, value in limits.items())
        self.path.write_text(entry("acme", "acme-key") + lines + entry("beta", "beta-key"))

    @staticmethod
    def of(name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {name}-key", "x-request-id": f"of-{name}"}


async def test_a_key_is_asked_for(tmp_path: Path) -> None:
    async with House(engine("e1"), api_keys=str(Tenants(tmp_path).path)) as house:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            stream = house.stream()
            await stream.head(headers=headers)
            answer = await stream.answered()
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
        assert await house.complete(chat(), headers=Tenants.of("acme")) == at("e1")


async def test_a_tenant_s_limits_are_429_with_its_headers(tmp_path: Path) -> None:
    keys = Tenants(tmp_path, requests_per_minute=1)
    async with House(engine("e1"), api_keys=str(keys.path)) as house:
        assert await house.complete(chat(), headers=keys.of("acme"))
        answer = await house.ask(chat(), headers=keys.of("acme"))
        assert (answer.status, answer.error["code"]) == (429, "rate_limit_exceeded")
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
        assert answer.headers["x-request-id"] == "of-acme"
        assert 50 <= int(answer.headers["retry-after"]) <= 60
        assert await house.complete(chat(), headers=keys.of("beta"))


async def test_concurrent_requests_of_a_tenant_count_to_the_end_of_the_response(tmp_path: Path) -> None:
    keys = Tenants(tmp_path, concurrent=1)
    async with House(engine("e1"), api_keys=str(keys.path)) as house:
        running = await house.ask(chat(), headers=keys.of("acme"))
        await running.stream.begin()
        assert (await house.ask(chat(), headers=keys.of("acme"))).status == 429
        await running.stream.send(response_trailers={})
        await until(house.free)
        assert await house.complete(chat(), headers=keys.of("acme"))


USAGE = b'{"usage": {"prompt_tokens": 9, "completion_tokens": 321, "prompt_tokens_details": {"cached_tokens": 4}}}'
EVENTS = b"".join(b'data: {"choices": []}\n\n' for _ in range(7)) + b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("response", "status", "output"),
    [(USAGE, 200, 321), (EVENTS, 200, 7), (EVENTS + b"data: " + USAGE + b"\n\n", 200, 321), (USAGE, 400, 0)],
)
async def test_output_tokens_are_charged_by_usage_or_by_events(
    tmp_path: Path, response: bytes, status: int, output: int
) -> None:
    """However the response is cut."""
    keys = Tenants(tmp_path, tokens_per_minute=3000)
    async with House(engine("e1"), api_keys=str(keys.path)) as house:
        answer = await house.ask(chat(max_tokens=5), headers=keys.of("acme"))
        await answer.stream.begin(status)
        for at_byte in range(0, len(response), 5):
            await answer.stream.send(response_body={"body": response[at_byte : at_byte + 5]})
            await answer.stream.read()
        await answer.stream.send(response_body={"body": b"", "end_of_stream": True})
        await answer.stream.read()
        await until(house.free)
        (counted,) = house.metrics.tenant_tokens.collect()
        found = {s.labels["kind"]: s.value for s in counted.samples if s.name.endswith("_total") and s.value}
        assert found.get("output", 0) == output
        assert ("prompt" in found) == (status == 200)
        left = float(house.tenants.limiter("acme").headers()["x-ratelimit-remaining-tokens"])
        assert left == pytest.approx(3000 - output - found.get("prompt", 0), abs=130), "a few seconds pass"
