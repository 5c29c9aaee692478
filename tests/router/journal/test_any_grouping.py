"""What a stream shows behind any event does not depend on how its tokens were grouped, before the break or after it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvferry.protocol.errors import KvferryError
from kvferry.router.dispatch.interface import Output, RequestSpec
from kvferry.router.text.template import ChatTemplate
from kvferry.router.text.text_model import TextModel
from tests.api_parts import FakeCluster, demo_text, ids_of, outputs_for
from tests.router_pair import CHAT, LEASE_S, Router, Shared, values

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"place": "Osló"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
THINKING = (
    "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n{# <tool_call> </think> #}"
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
)
ANSWERS = (
    "Grüße aus 東京 — 🙂🙂, and on. " * 2,
    f"First I think of it.\n</think>\n\nLet me look 🙂. {CALL}\n{CALL}",
    "I think\n</think>\nIt ends STOP here, and this is never shown.",
)


def model() -> TextModel:
    return replace(demo_text(), template=ChatTemplate(THINKING, {}))


class Grouping:
    """A script whose outputs hold random numbers of tokens, other ones for each dispatch."""

    def __init__(self, text: str, seed: int) -> None:
        self._text, self._draws = text, random.Random(seed)

    def __call__(self, spec: RequestSpec) -> Sequence[Output | KvferryError]:
        singles = outputs_for(spec, ids_of(self._text), per_output=1)
        outputs: list[Output] = []
        while singles:
            taken, singles = singles[: (count := self._draws.randint(1, 5))], singles[count:]
            ids = tuple(token for each in taken for token in each.token_ids)
            outputs.append(replace(taken[-1], token_ids=ids))
        return outputs


def shown(events: list[str]) -> dict[int, dict[str, Any]]:
    """Return what a client of these events has: texts, reasoning, calls and the end of each choice."""
    choices: dict[int, dict[str, Any]] = {}
    for value in values(events):
        for choice in value["choices"]:
            known = choices.setdefault(choice["index"], {"content": "", "reasoning": "", "calls": {}, "finish": None})
            delta = choice["delta"]
            known["content"] += delta.get("content") or ""
            known["reasoning"] += delta.get("reasoning") or ""
            known["finish"] = choice["finish_reason"] or known["finish"]
            for call in delta.get("tool_calls", ()):
                kept = known["calls"].setdefault(call["index"], {"id": "", "name": "", "arguments": ""})
                kept["id"] += call.get("id", "")
                kept["name"] += call["function"].get("name", "")
                kept["arguments"] += call["function"]["arguments"]
    return choices


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("answer", range(len(ANSWERS)))
async def test_a_cut_anywhere(answer: int, seed: int) -> None:
    draws = random.Random(seed)
    together = Shared(FakeCluster(Grouping(ANSWERS[answer], seed), gap_s=0.001), model())
    body = {
        "messages": [{"role": "user", "content": "Weather?"}], "stream": True, "max_tokens": 300, "tools": [TOOL],
        "stop": ["STOP"], "n": draws.choice((1, 1, 3)),
    }  # fmt: skip
    async with Router(together) as first, Router(together) as second:
        whole = await second.post(CHAT, body, accept="text/event-stream").whole()
        exchange = first.post(CHAT, body, accept="text/event-stream")
        await exchange.until(draws.randint(2, max(2, len(whole.events) - 2)))
        exchange.cut(draws.randint(1, len(exchange.events)))
        name = exchange.last_id.partition(":")[0]
        was_written = await together.journals.read("", name) is not None
        if draws.random() < 0.5:
            first.kill()
            await asyncio.sleep(LEASE_S if draws.random() < 0.5 else 0)
        else:
            await exchange.leave()
            was_written = True
        await asyncio.sleep(0.05)
        rest = await second.get(f"{CHAT}/{name}", last_event_id=exchange.last_id, accept="text/event-stream").whole()
        if rest.status == 404:
            assert not was_written, "it died before the first write"
            return
        told, expected = shown([*exchange.events, *rest.events]), shown(whole.events)
        unique = [call.pop("id") for choice in told.values() for call in choice["calls"].values()]
        for choice in expected.values():
            for call in choice["calls"].values():
                call.pop("id")
        assert told == expected
        assert all(len(each) == len("call_") + 24 for each in unique), "told once"
        assert len(set(unique)) == len(unique)


async def test_calls_have_the_same_ids_after_a_takeover() -> None:
    together = Shared(FakeCluster(Grouping(ANSWERS[1], 3), gap_s=0.02), model())
    body = {"messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 300, "tools": [TOOL], "stream": True}
    async with Router(together) as first, Router(together) as second:
        exchange = first.post(CHAT, body, idempotency_key="k")
        async with asyncio.timeout(10):
            while b"get_weather" not in exchange.data:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        first.kill()
        whole = await second.post(CHAT, body, idempotency_key="k").whole()
        before, after = shown(exchange.events)[0]["calls"], shown(whole.events)[0]["calls"]
        assert before[0]["id"] == after[0]["id"]
        assert len({call["id"] for call in after.values()}) == 2
