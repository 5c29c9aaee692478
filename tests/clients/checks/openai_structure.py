"""The official Python client: structured output and tools."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Literal

import openai
from harness import MODEL, URL, check, raises
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60)
ASK = [{"role": "user", "content": "Ada is 36 years old and lives in London. What is the weather there?"}]
BASE = {"model": MODEL, "messages": ASK, "temperature": 0, "max_tokens": 200}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Mood(StrEnum):
    happy = "happy"
    sad = "sad"


class Person(BaseModel):
    name: str
    age: int
    mood: Mood
    plan: Literal["free", "paid"]


class Weather(BaseModel):
    """Look up the weather."""

    city: Literal["London", "Paris"]
    unit: Literal["C", "F"]


def function(name, schema, strict=True):
    return {
        "type": "function",
        "function": {"name": name, "description": f"{name} of a place", "parameters": schema, "strict": strict},
    }


PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["London", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER, CLOCK = function("weather", PLACE), function("clock", PLACE)


@check
def json_mode_gives_an_object():
    answer = client.chat.completions.create(**BASE, response_format={"type": "json_object"})
    choice = answer.choices[0]
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


@check
def json_schema_is_kept():
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    found = json.loads(client.chat.completions.create(**BASE, response_format=form).choices[0].message.content)
    assert found.keys() == {"name", "age"}
    assert isinstance(found["age"], int)


@check
def json_schema_is_kept_when_hot_and_streamed():
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    stream = client.chat.completions.create(**{**BASE, "temperature": 1}, response_format=form, seed=3, stream=True)
    text = "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)
    assert json.loads(text).keys() == {"name", "age"}


@check
def parse_gives_a_model():
    message = client.chat.completions.parse(**BASE, response_format=Person).choices[0].message
    assert isinstance(message.parsed, Person)


@check
def parse_streams_a_model():
    with client.chat.completions.stream(**BASE, response_format=Person) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)


@check
def parse_tells_a_length():
    with raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**{**BASE, "max_tokens": 2}, response_format=Person)


@check
def plain_text_format_is_allowed():
    assert client.chat.completions.create(**{**BASE, "max_tokens": 4}, response_format={"type": "text"}).choices


@check
def a_broken_schema_is_refused():
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}, "strict": True}}
    with raises(openai.BadRequestError):
        client.chat.completions.create(**BASE, response_format=form)


@check
def several_structured_choices():
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = client.chat.completions.create(**{**BASE, "temperature": 1}, response_format=form, n=3, seed=5)
    assert all(json.loads(choice.message.content)["name"] is not None for choice in answer.choices)


@check
def guided_choice_of_vllm():
    extra = {"structured_outputs": {"choice": ["positive", "negative"]}}
    answer = client.chat.completions.create(**BASE, extra_body=extra)
    assert answer.choices[0].message.content in ("positive", "negative")


@check
def guided_regex_of_vllm():
    answer = client.completions.create(
        model=MODEL, prompt="A date: ", max_tokens=20, extra_body={"structured_outputs": {"regex": r"\d{4}-\d{2}"}}
    )
    year, month = answer.choices[0].text.split("-")
    assert len(year) == 4
    assert month.isdecimal()


@check
def tools_are_called_when_required():
    answer = client.chat.completions.create(**BASE, tools=[WEATHER, CLOCK], tool_choice="required")
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    for call in choice.message.tool_calls:
        assert call.id
        assert call.type == "function"
        assert call.function.name in ("weather", "clock")
        assert json.loads(call.function.arguments)["city"] in ("London", "Paris")


@check
def a_named_tool_is_called():
    choice = {"type": "function", "function": {"name": "clock"}}
    answer = client.chat.completions.create(**BASE, tools=[WEATHER, CLOCK], tool_choice=choice).choices[0]
    assert [call.function.name for call in answer.message.tool_calls] == ["clock"]
    assert json.loads(answer.message.tool_calls[0].function.arguments)["city"] in ("London", "Paris")


@check
def one_call_at_a_time():
    answer = client.chat.completions.create(
        **BASE, tools=[WEATHER, CLOCK], tool_choice="required", parallel_tool_calls=False
    )
    assert len(answer.choices[0].message.tool_calls) == 1


@check
def several_calls_have_their_own_ids():
    answer = client.chat.completions.create(
        **BASE, tools=[WEATHER, CLOCK], tool_choice="required", parallel_tool_calls=True, n=2
    )
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls]
    assert len(set(ids)) == len(ids) >= 2


@check
def auto_answers_in_text_or_calls():
    answer = client.chat.completions.create(**BASE, tools=[WEATHER]).choices[0]
    assert answer.finish_reason in ("stop", "length", "tool_calls")
    assert bool(answer.message.tool_calls) == (answer.finish_reason == "tool_calls")


@check
def none_never_calls():
    answer = client.chat.completions.create(**{**BASE, "max_tokens": 20}, tools=[WEATHER], tool_choice="none")
    assert not answer.choices[0].message.tool_calls


@check
def calls_are_streamed():
    stream = client.chat.completions.create(**BASE, tools=[WEATHER], tool_choice="required", stream=True)
    parts, reasons = {}, []
    for chunk in stream:
        for choice in chunk.choices:
            reasons.append(choice.finish_reason)
            for call in choice.delta.tool_calls or []:
                known = parts.setdefault(call.index, {"id": call.id, "name": call.function.name, "arguments": ""})
                known["arguments"] += call.function.arguments or ""
    assert [reason for reason in reasons if reason] == ["tool_calls"]
    assert sorted(parts) == list(range(len(parts)))
    for part in parts.values():
        assert part["id"]
        assert part["name"] == "weather"
        assert json.loads(part["arguments"])["city"] in ("London", "Paris")


@check
def the_stream_helper_collects_calls():
    with client.chat.completions.stream(**BASE, tools=[WEATHER], tool_choice="required") as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in kinds
    assert final.tool_calls[0].function.name == "weather"


@check
def parse_gives_arguments_as_a_model():
    tool = openai.pydantic_function_tool(Weather)
    answer = client.chat.completions.parse(**BASE, tools=[tool], tool_choice="required").choices[0]
    assert isinstance(answer.message.tool_calls[0].function.parsed_arguments, Weather)


@check
def results_of_tools_go_back():
    first = client.chat.completions.create(**BASE, tools=[WEATHER], tool_choice="required").choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"sky": "clear"})} for call in first.tool_calls
    ]
    after = client.chat.completions.create(
        **{**BASE, "max_tokens": 20, "messages": [*ASK, first, *results]}, tools=[WEATHER], tool_choice="none"
    )
    assert after.choices[0].message.content


@check
def a_tool_without_parameters():
    tool = {"type": "function", "function": {"name": "now"}}
    call = client.chat.completions.create(**BASE, tools=[tool], tool_choice="required").choices[0].message.tool_calls[0]
    assert call.function.name == "now"
    assert isinstance(json.loads(call.function.arguments), dict)


@check
def a_named_tool_must_exist():
    with raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            **BASE, tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "nothing"}}
        )
    assert caught[0].param.startswith("tool_choice")


@check
def required_needs_tools():
    with raises(openai.BadRequestError):
        client.chat.completions.create(**BASE, tool_choice="required")
