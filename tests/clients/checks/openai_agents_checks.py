"""The OpenAI Agents SDK, over responses (its default) and over chat."""

from __future__ import annotations

from typing import Literal

import agents
import openai
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from harness import MODEL, URL, check, raises
from pydantic import BaseModel

agents.set_tracing_disabled(True)
ASK = "Why is the sky blue?"
SHORT = ModelSettings(temperature=0, max_tokens=16)
LONGER = ModelSettings(temperature=0, max_tokens=120)


def server():
    """A client of its own for each check: each has an event loop of its own."""
    return openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


def responses():
    return OpenAIResponsesModel(MODEL, openai_client=server())


def chat():
    return OpenAIChatCompletionsModel(MODEL, openai_client=server())


class Person(BaseModel):
    name: Literal["Ada", "Bob"]
    grown_up: bool


@function_tool
def weather(city: Literal["London", "Paris"]) -> str:
    """The weather of a city."""
    return f"clear in {city}"


async def answers(model):
    result = await Runner.run(Agent("a", instructions="Be terse.", model=model, model_settings=SHORT), ASK)
    assert result.final_output


async def streams(model):
    result = Runner.run_streamed(Agent("a", model=model, model_settings=SHORT), ASK)
    kinds = [event.data.type async for event in result.stream_events() if event.type == "raw_response_event"]
    assert "response.output_text.delta" in kinds
    assert result.final_output


async def calls(model):
    settings = ModelSettings(temperature=0, max_tokens=120, tool_choice="required")
    agent = Agent("a", model=model, model_settings=settings, tools=[weather], tool_use_behavior="stop_on_first_tool")
    result = await Runner.run(agent, "What is the weather in Paris?")
    assert result.final_output.startswith("clear in ")


async def goes_round(model):
    """After the first call the SDK resets the choice, and the model answers in text or calls again."""
    settings = ModelSettings(temperature=0, max_tokens=120, tool_choice="required")
    agent = Agent("a", model=model, model_settings=settings, tools=[weather])
    try:
        result = await Runner.run(agent, "What is the weather in Paris?", max_turns=3)
        assert result.final_output is not None
    except agents.MaxTurnsExceeded:
        pass


async def structured(model):
    agent = Agent("a", model=model, model_settings=LONGER, output_type=Person)
    assert isinstance((await Runner.run(agent, "Ada is 36.")).final_output, Person)


async def remembers(model):
    agent = Agent("a", model=model, model_settings=SHORT)
    first = await Runner.run(agent, ASK)
    items = [*first.to_input_list(), {"role": "user", "content": "And at night?"}]
    assert (await Runner.run(agent, items)).final_output


@check
async def responses_answer():
    await answers(responses())


@check
async def responses_stream():
    await streams(responses())


@check
async def responses_call_tools():
    await calls(responses())


@check
async def responses_go_round():
    await goes_round(responses())


@check
async def responses_structured():
    await structured(responses())


@check
async def responses_remember():
    await remembers(responses())


@check
async def responses_go_on_by_id():
    agent = Agent("a", model=responses(), model_settings=SHORT)
    first = await Runner.run(agent, ASK)
    second = await Runner.run(agent, "And at night?", previous_response_id=first.last_response_id)
    assert second.final_output


@check
async def chat_answers():
    await answers(chat())


@check
async def chat_streams():
    await streams(chat())


@check
async def chat_calls_tools():
    await calls(chat())


@check
async def chat_goes_round():
    await goes_round(chat())


@check
async def chat_structured():
    await structured(chat())


@check
async def chat_remembers():
    await remembers(chat())


@check
async def errors_come_through():
    with raises(openai.BadRequestError):
        await Runner.run(Agent("a", model=responses(), model_settings=ModelSettings(temperature=-1)), ASK)


@check
def in_sync():
    assert Runner.run_sync(Agent("a", model=responses(), model_settings=SHORT), ASK).final_output
