"""The official Python client: /v1/responses."""

from __future__ import annotations

import asyncio
import json

import openai
from harness import MODEL, URL, check, raises
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60)
BASE = {"model": MODEL, "input": "Why is the sky blue?", "max_output_tokens": 16, "temperature": 0}
PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["London", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "weather", "description": "the weather", "parameters": PLACE, "strict": True}


class Fact(BaseModel):
    short: bool
    rating: int


@check
def a_response_answers():
    answer = client.responses.create(**BASE)
    assert answer.object == "response"
    assert answer.output_text
    assert answer.output[0].role == "assistant"
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 16
    assert answer.usage.total_tokens == answer.usage.input_tokens + 16


@check
def instructions_and_items_are_read():
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hi", "annotations": []}], "type": "message"},
        {"role": "user", "content": "Why is the sky blue?"},
    ]
    short = client.responses.create(**BASE)
    long = client.responses.create(**{**BASE, "input": items}, instructions="Be terse.")
    assert long.usage.input_tokens > short.usage.input_tokens


@check
def a_response_says_what_chat_says():
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": BASE["input"]}], max_tokens=16, temperature=0
    )
    assert client.responses.create(**BASE).output_text == chat.choices[0].message.content


@check
def the_whole_sequence_of_events():
    events = list(client.responses.create(**BASE, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:-1] == ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text


@check
def the_stream_helper_collects():
    with client.responses.stream(**BASE) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text


@check
def a_conversation_goes_on():
    first = client.responses.create(**BASE)
    second = client.responses.create(**{**BASE, "input": "And at night?"}, previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.total_tokens - 4


@check
def responses_are_kept_and_deleted():
    made = client.responses.create(**BASE)
    assert client.responses.retrieve(made.id).output_text == made.output_text
    client.responses.delete(made.id)
    with raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


@check
def what_is_not_stored_is_not_found():
    made = client.responses.create(**BASE, store=False)
    with raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with raises(openai.NotFoundError, openai.BadRequestError):
        client.responses.create(**BASE, previous_response_id=made.id)


@check
def input_items_are_listed():
    made = client.responses.create(**BASE)
    items = client.responses.input_items.list(made.id).data
    assert items[0].role == "user"


@check
def unknown_responses_are_not_found():
    with raises(openai.NotFoundError):
        client.responses.retrieve("resp_00000000000000000000000000000000")


@check
def structured_text():
    parsed = client.responses.parse(**{**BASE, "max_output_tokens": 60}, text_format=Fact)
    assert isinstance(parsed.output_parsed, Fact)


@check
def json_object_text():
    made = client.responses.create(**{**BASE, "max_output_tokens": 100}, text={"format": {"type": "json_object"}})
    assert made.status == "incomplete" or isinstance(json.loads(made.output_text), dict)


@check
def a_required_tool_is_called():
    made = client.responses.create(**{**BASE, "max_output_tokens": 80}, tools=[TOOL], tool_choice="required")
    calls = [item for item in made.output if item.type == "function_call"]
    assert calls
    assert calls[0].name == "weather"
    assert calls[0].call_id
    assert json.loads(calls[0].arguments)["city"] in ("London", "Paris")


@check
def a_call_is_streamed():
    events = list(
        client.responses.create(
            **{**BASE, "max_output_tokens": 80}, tools=[TOOL], tool_choice={"type": "function", "name": "weather"},
            stream=True,
        )
    )  # fmt: skip
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert "".join(deltas) == done.arguments
    assert json.loads(done.arguments)["city"] in ("London", "Paris")


@check
def results_of_a_tool_go_back():
    made = client.responses.create(**{**BASE, "max_output_tokens": 80}, tools=[TOOL], tool_choice="required")
    call = next(item for item in made.output if item.type == "function_call")
    after = client.responses.create(
        model=MODEL, previous_response_id=made.id, tools=[TOOL], tool_choice="none", max_output_tokens=16,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}],
    )  # fmt: skip
    assert after.output_text


@check
def bad_values_are_bad_requests():
    with raises(openai.BadRequestError) as caught:
        client.responses.create(**{**BASE, "temperature": -1})
    assert caught[0].param == "temperature"
    with raises(openai.NotFoundError):
        client.responses.create(**{**BASE, "model": "no-such-model"})


@check
async def async_streams():
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as one:
        stream = await one.responses.create(**BASE, stream=True)
        kinds = [event.type async for event in stream]
    assert "response.output_text.delta" in kinds


@check
async def a_left_stream_frees_its_place():
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as one:
        stream = await one.responses.create(**{**BASE, "max_output_tokens": 2000}, stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        async with asyncio.timeout(20):
            assert (await one.responses.create(**BASE)).output_text
