"""Sessions as clients name them in each API, what nodes are told of them, and what usage says was cached."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from kvferry.protocol.prefix_reuse import Reuse
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.sessions import MAX_NOTES, NAME_BYTES, TOOL_GROUPS, SessionNotes, session_name, tool_group
from kvferry.protocol.settings import RouterSettings
from kvferry.protocol.work import Generate
from kvferry.router.dispatch.interface import RequestSpec, Route
from kvferry.router.request_context import RequestContext
from kvferry.router.tenants.keys import entry
from tests.api_parts import Api, FakeCluster, app_of, demo_text, error_of, says
from tests.fake_workers import Bench, decode, prefill
from tests.waiting import until

ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9},
}
"""A body of each endpoint."""
MINE = session_name("", "mine")


async def ask(api: Api, path: str, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    return await api.http.post(path, json={**ASKED[path], **more}, headers=headers)


@pytest.mark.parametrize("path", ASKED)
async def test_the_header_names_the_session_in_every_api(path: str) -> None:
    api = Api(FakeCluster(says("x")))
    assert (await ask(api, path, {"X-Session-Id": "mine"}, prompt_cache_key="other")).status_code == 200
    assert (await ask(api, path)).status_code == 200
    assert [dispatch.spec.session for dispatch in api.cluster.dispatches] == [MINE, ""]


@pytest.mark.parametrize("path", [path for path in ASKED if path != "/v1/messages"])
async def test_openai_s_fields_name_the_session_and_its_retention(path: str) -> None:
    api = Api(FakeCluster(says("x")))
    for retention, kept in (("24h", "24h"), ("in_memory", ""), ("in-memory", ""), (None, "")):
        answer = await ask(api, path, prompt_cache_key="mine", prompt_cache_retention=retention)
        assert answer.status_code == 200, answer.text
        spec = api.cluster.dispatches[-1].spec
        assert (spec.session, spec.call.session, spec.retention) == (MINE, MINE, kept)


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        ({"system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]}, "1h"),
        ({"system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}, ""),
        ({"tools": [{"name": "t", "input_schema": {}, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]}, "1h"),
        ({"cache_control": {"type": "ephemeral", "ttl": "5m"}}, ""),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "5m"}},
                            {"type": "text", "text": "b", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
                        ],
                    }
                ]
            },
            "1h",
        ),
    ],
)
async def test_anthropic_s_longest_ttl_counts(body: dict[str, Any], kept: str) -> None:
    api = Api(FakeCluster(says("x")))
    assert (await ask(api, "/v1/messages", **body)).status_code == 200
    assert api.cluster.dispatches[-1].spec.retention == kept


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {"prompt_cache_key": "x" * 257}, "prompt_cache_key"),
        ("/v1/chat/completions", {"prompt_cache_retention": "2d"}, "prompt_cache_retention"),
        ("/v1/responses", {"prompt_cache_retention": 1}, "prompt_cache_retention"),
    ],
)
async def test_wrong_fields_are_named(path: str, body: dict[str, Any], field: str) -> None:
    answer = await ask(Api(FakeCluster(says("x"))), path, **body)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == field


@pytest.mark.parametrize("where", ["body", "block"])
async def test_a_wrong_ttl_is_refused(where: str) -> None:
    mark = {"type": "ephemeral", "ttl": "2h"}
    body = (
        {"cache_control": mark}
        if where == "body"
        else {"system": [{"type": "text", "text": "a", "cache_control": mark}]}
    )
    answer = await ask(Api(FakeCluster(says("x"))), "/v1/messages", **body)
    assert answer.status_code == 400
    assert "must be 5m or 1h" in json.dumps(answer.json())


def test_names_on_the_wire_have_one_length_and_differ_between_tenants() -> None:
    names = {session_name(tenant, given) for tenant in ("", "a", "1") for given in ("x", "y" * 5000, "1:a")}
    assert len(names) == 9
    assert {len(name) for name in names} == {2 * NAME_BYTES}
    assert session_name("a", "") == ""


def test_tools_have_one_of_few_groups_whatever_their_order_and_number() -> None:
    assert tool_group(()) == 0
    assert tool_group(("a", "b")) == tool_group(("b", "a", "b"))
    groups = {tool_group((f"tool {number}",)) for number in range(1000)}
    assert groups == {*range(1, TOOL_GROUPS + 1)}


async def test_closing_a_session_reaches_every_model_under_the_tenants_own_name(tmp_path: Any) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("\n".join(entry(name, f"key-{name}") for name in "ab"))
    api = Api(FakeCluster(says("x")), api_keys=str(keys))
    header = {"authorization": "Bearer key-a"}
    assert (await api.http.delete("/v1/sessions/mine")).status_code == 401
    answer = await api.http.delete("/v1/sessions/mine", headers=header)
    assert answer.json() == {"id": "mine", "object": "session", "deleted": True}
    assert api.cluster.closed == [session_name("a", "mine")]
    assert (await api.http.delete("/v1/sessions/" + "x" * 257, headers=header)).status_code == 400


async def test_a_tool_call_is_told_and_an_answer_is_not() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    calls = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    for text, told in ((calls, {"look"}), ("Hello", set[str]())):
        for stream in (False, True):
            api = Api(FakeCluster(says(text)))
            assert (await api.chat(tools=[tool], stream=stream)).status_code == 200
            assert api.cluster.dispatches[-1].called_tools == told


async def test_a_dispatch_tells_the_nodes_that_have_its_blocks() -> None:
    async with Bench([prefill(), decode()]) as bench:
        call = RequestContext("c", time.monotonic(), time.monotonic() + 60)
        spec = RequestSpec(call, "c", (5,) * 300, Generate(SamplingParams(max_tokens=3, ignore_eos=True)))
        dispatch = bench.cluster.start(spec)
        dispatch.calls_tools(("look", "find"))
        async for _ in dispatch:
            pass
        dispatch.calls_tools(("look", "find"))
        workers = [*bench.workers.values()]
        await until(lambda: all(worker.notes for worker in workers))
        (job,) = {each.job.request_id for worker in workers for each in worker.prefills}
        assert [worker.notes for worker in workers] == [
            [SessionNotes((job,), (tool_group(("find", "look", "find")),))]
        ] * 2


async def test_adapters_of_other_engines_are_told_nothing_and_long_lists_come_in_parts() -> None:
    async with Bench([decode(), decode("d2", changes={"engine": "vllm 1"})]) as bench:
        for number in range(MAX_NOTES + 1):
            bench.cluster.close_session(str(number))
        own, other = bench["d1"], bench["d2"]
        await until(lambda: len(own.notes) == 2)
        assert sorted(len(note.closed) for note in own.notes) == [1, MAX_NOTES]
        assert not other.notes


async def test_nodes_hear_of_tool_calls_and_closed_sessions() -> None:
    async with Bench([prefill(), decode()]) as bench:
        app = app_of(bench.cluster, demo_text(), bench.metrics, RouterSettings())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as http:
            body = {"prompt": [5] * 300, "max_tokens": 3, "ignore_eos": True}
            answer = await http.post("/v1/completions", json=body, headers={"x-session-id": "mine"})
            assert answer.status_code == 200, answer.text
            await http.delete("/v1/sessions/mine")
            await until(lambda: all(worker.notes for worker in bench.workers.values()))
        for worker in bench.workers.values():
            assert worker.notes == [SessionNotes(closed=(MINE,))]
            assert {each.job.session for each in worker.prefills} <= {MINE}
        assert sum(len(worker.prefills) for worker in bench.workers.values()) == 1


async def test_usage_says_what_was_read_and_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster(says("x"))
    own = cluster.start

    def start(spec: Any) -> Any:
        dispatch, length = own(spec), len(spec.token_ids)
        reuse = Reuse(length, reused_decode=4, computed=length - 4, written=length - 6)
        assert reuse.balanced
        dispatch._route = Route(None, "d0", reuse)
        return dispatch

    monkeypatch.setattr(cluster, "start", start)
    api = Api(cluster)
    usage = (await ask(api, "/v1/messages")).json()["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (2, 4)
    prompt = len(api.cluster.dispatches[-1].spec.token_ids)
    assert usage["cache_creation_input_tokens"] == prompt - 6
    details = (await ask(api, "/v1/responses")).json()["usage"]["input_tokens_details"]
    prompt = len(api.cluster.dispatches[-1].spec.token_ids)
    assert details == {"cached_tokens": 4, "cache_write_tokens": prompt - 6}
    chat = (await ask(api, "/v1/chat/completions")).json()["usage"]
    assert chat["prompt_tokens_details"] == {"cached_tokens": 4}
