"""instructor: structured output in each of its modes that an OpenAI server can have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import instructor
import openai
from harness import MODEL, URL, check
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
ASK = {
    "model": MODEL, "temperature": 0, "max_tokens": 200, "max_retries": 0,
    "messages": [{"role": "user", "content": "Ada is 36 years old."}],
}  # fmt: skip


class Person(BaseModel):
    name: Literal["Ada", "Bob"]
    age: Literal[36, 63]


def extracts(mode):
    person = instructor.from_openai(client, mode=mode).chat.completions.create(**ASK, response_model=Person)
    assert isinstance(person, Person)


@check
def by_tools():
    extracts(instructor.Mode.TOOLS)


@check
def by_strict_tools():
    extracts(instructor.Mode.TOOLS_STRICT)


@check
def by_json_schema():
    extracts(instructor.Mode.JSON_SCHEMA)


@check
def with_the_completion():
    made = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    person, raw = made.chat.completions.create_with_completion(**ASK, response_model=Person)
    assert isinstance(person, Person)
    assert raw.usage.completion_tokens > 0


@check
def partly_as_it_comes():
    made = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    parts = list(made.chat.completions.create_partial(**ASK, response_model=Person))
    assert parts[-1].name in ("Ada", "Bob")


@check
def several_of_them():
    class People(BaseModel):
        people: tuple[Person, Person]

    made = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    assert len(made.chat.completions.create(**ASK, response_model=People).people) == 2


@check
def an_iterable_is_streamed():
    made = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    for person in made.chat.completions.create(**ASK, response_model=Iterable[Person], stream=True):
        assert isinstance(person, Person)
        break


@check
async def async_extraction():
    many = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    made = instructor.from_openai(many, mode=instructor.Mode.TOOLS)
    assert isinstance(await made.chat.completions.create(**ASK, response_model=Person), Person)


@check
def a_choice():
    class Mood(BaseModel):
        mood: Literal["happy", "sad"]

    made = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    assert made.chat.completions.create(**ASK, response_model=Mood).mood in ("happy", "sad")
