"""Anthropic's client against /v1/messages."""

from __future__ import annotations

import anthropic
from harness import MODEL, URL, check, raises

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=60)
ASK = [{"role": "user", "content": "Why is the sky blue?"}]
BASE = {"model": MODEL, "max_tokens": 12, "messages": ASK, "temperature": 0}
WEATHER = {
    "name": "weather",
    "description": "the weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["London", "Paris"]}}, "required": ["city"]},
}
CALLING = {**BASE, "max_tokens": 120, "tools": [WEATHER]}


@check
def a_message():
    answer = client.messages.create(**BASE)
    assert (answer.type, answer.role, answer.stop_reason) == ("message", "assistant", "max_tokens")
    assert answer.content[0].type == "text"
    assert answer.content[0].text
    assert answer.usage.output_tokens == 12


@check
def what_chat_says():
    import json
    import urllib.request

    body = json.dumps({"model": MODEL, "messages": ASK, "max_tokens": 12, "temperature": 0}).encode()
    request = urllib.request.Request(f"{URL}/v1/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        said = json.load(response)["choices"][0]["message"]["content"]
    assert client.messages.create(**BASE).content[0].text == said


@check
def system_and_parts():
    parts = [{"type": "text", "text": "Why is the sky blue?"}]
    short = client.messages.create(**BASE)
    for system in ("Be terse.", [{"type": "text", "text": "Be terse."}]):
        longer = client.messages.create(**{**BASE, "messages": [{"role": "user", "content": parts}]}, system=system)
        assert longer.content[0].text
    assert short.usage.input_tokens > 0


@check
def the_whole_sequence_of_events():
    events = list(client.messages.create(**BASE, stream=True))
    kinds = [event.type for event in events if event.type != "ping"]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(event.delta.text for event in events if event.type == "content_block_delta")
    assert text == client.messages.create(**BASE).content[0].text


@check
def the_stream_helper_collects():
    with client.messages.stream(**BASE) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].text == text
    assert final.usage.output_tokens == 12


@check
def stop_sequences():
    word = client.messages.create(**BASE).content[0].text.split()[3]
    cut = client.messages.create(**BASE, stop_sequences=[word])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", word)
    assert word not in cut.content[0].text


@check
def tokens_are_counted():
    counted = client.messages.count_tokens(model=MODEL, messages=ASK)
    made = client.messages.create(**BASE).usage
    assert counted.input_tokens == made.input_tokens + (made.cache_read_input_tokens or 0)


@check
def counting_reads_tools():
    plain = client.messages.count_tokens(model=MODEL, messages=ASK).input_tokens
    assert client.messages.count_tokens(model=MODEL, messages=ASK, tools=[WEATHER]).input_tokens > plain


@check
def any_tool_is_called():
    answer = client.messages.create(**CALLING, tool_choice={"type": "any"})
    assert answer.stop_reason == "tool_use"
    block = next(block for block in answer.content if block.type == "tool_use")
    assert block.name == "weather"
    assert block.input["city"] in ("London", "Paris")


@check
def a_named_tool_is_called():
    answer = client.messages.create(**CALLING, tool_choice={"type": "tool", "name": "weather"})
    assert [block.name for block in answer.content if block.type == "tool_use"] == ["weather"]


@check
def a_call_is_streamed():
    with client.messages.stream(**CALLING, tool_choice={"type": "any"}) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert "input_json" in kinds
    assert final.stop_reason == "tool_use"
    assert next(block for block in final.content if block.type == "tool_use").input["city"] in ("London", "Paris")


@check
def results_go_back():
    answer = client.messages.create(**CALLING, tool_choice={"type": "any"})
    call = next(block for block in answer.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "clear"}
    history = [*ASK, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(**{**CALLING, "messages": history}, tool_choice={"type": "none"})
    assert after.content[0].type == "text"


@check
def wrong_values_are_bad_requests():
    with raises(anthropic.BadRequestError) as caught:
        client.messages.create(**{**BASE, "temperature": -1})
    assert caught[0].body["type"] == "error"
    assert caught[0].body["error"]["type"] == "invalid_request_error"


@check
def unknown_models_are_not_found():
    with raises(anthropic.NotFoundError) as caught:
        client.messages.create(**{**BASE, "model": "no-such-model"})
    assert caught[0].body["error"]["type"] == "not_found_error"


@check
def an_image_is_refused():
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    with raises(anthropic.BadRequestError):
        client.messages.create(**{**BASE, "messages": [{"role": "user", "content": [image]}]})


@check
def a_closed_stream_frees_its_place():
    stream = client.messages.create(**{**BASE, "max_tokens": 2000}, stream=True)
    for event in stream:
        if event.type == "content_block_delta":
            break
    stream.close()
    assert client.messages.create(**BASE).content


@check
async def async_messages():
    async with anthropic.AsyncAnthropic(base_url=URL, api_key="none") as many:
        assert (await many.messages.create(**BASE)).content[0].text
        async with many.messages.stream(**BASE) as stream:
            assert [text async for text in stream.text_stream]
