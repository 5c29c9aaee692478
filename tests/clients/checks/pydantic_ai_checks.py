"""pydantic-ai: agents over chat and over responses."""

from __future__ import annotations

from typing import Literal

from harness import MODEL, URL, check, raises
from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
chat = OpenAIChatModel(MODEL, provider=provider)
SETTINGS = {"temperature": 0, "max_tokens": 200}
SHORT = {"temperature": 0, "max_tokens": 12}
ASK = "Why is the sky blue?"


class Person(BaseModel):
    name: Literal["Ada", "Bob"]
    grown_up: bool


@check
async def an_agent_answers():
    result = await Agent(chat, model_settings=SHORT).run(ASK)
    assert result.output
    assert result.usage.output_tokens == 12


@check
def an_agent_answers_in_sync():
    assert Agent(chat, system_prompt="Be terse.", model_settings=SHORT).run_sync(ASK).output


@check
async def an_agent_streams():
    async with Agent(chat, model_settings=SHORT).run_stream(ASK) as result:
        parts = [part async for part in result.stream_text(delta=True, debounce_by=None)]
    assert len(parts) > 1


@check
async def a_conversation_goes_on():
    agent = Agent(chat, model_settings=SHORT)
    first = await agent.run(ASK)
    second = await agent.run("And at night?", message_history=first.all_messages())
    assert second.usage.input_tokens > first.usage.input_tokens


@check
async def output_by_a_schema():
    result = await Agent(chat, output_type=NativeOutput(Person), model_settings=SETTINGS).run("Ada is 36.")
    assert isinstance(result.output, Person)


@check
async def output_by_a_tool():
    result = await Agent(chat, output_type=ToolOutput(Person), model_settings=SETTINGS).run("Ada is 36.")
    assert isinstance(result.output, Person)


@check
async def streamed_output_by_a_tool():
    async with Agent(chat, output_type=ToolOutput(Person), model_settings=SETTINGS).run_stream("Ada is 36.") as result:
        assert isinstance(await result.get_output(), Person)


@check
async def tools_are_offered():
    agent = Agent(chat, model_settings={**SETTINGS, "max_tokens": 60}, retries=3)

    @agent.tool_plain
    def weather(city: Literal["London", "Paris"]) -> str:
        """The weather of a city."""
        return f"clear in {city}"

    assert (await agent.run("Hello")).output


@check
async def wrong_values_are_errors():
    with raises(ModelHTTPError) as caught:
        await Agent(chat, model_settings={"temperature": -1}).run(ASK)
    assert caught[0].status_code == 400


@check
async def the_responses_model():
    result = await Agent(OpenAIResponsesModel(MODEL, provider=provider), model_settings={"max_tokens": 16}).run(ASK)
    assert result.output


@check
async def the_responses_model_with_a_schema():
    agent = Agent(
        OpenAIResponsesModel(MODEL, provider=provider), output_type=NativeOutput(Person), model_settings=SETTINGS
    )
    assert isinstance((await agent.run("Ada is 36.")).output, Person)


@check
async def the_responses_model_streams():
    agent = Agent(OpenAIResponsesModel(MODEL, provider=provider), model_settings={"max_tokens": 16})
    async with agent.run_stream(ASK) as result:
        assert await result.get_output()
