"""smolagents over chat completions: agents that call tools in JSON, and agents that write Python."""

from __future__ import annotations

import openai
from harness import MODEL, URL, check, full_stop, raises
from smolagents import AgentError, CodeAgent, LogLevel, OpenAIServerModel, ToolCallingAgent, tool


@tool
def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: name of the city
    """
    return f"clear in {city}"


def model(**more):
    return OpenAIServerModel(model_id=MODEL, api_base=f"{URL}/v1", api_key="none", temperature=0, max_tokens=60, **more)


@check
def a_model_answers():
    answer = model(extra_body=full_stop()).generate([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}])
    assert answer.content
    assert answer.token_usage.input_tokens > 0


@check
def a_model_streams():
    asked = [{"role": "user", "content": [{"type": "text", "text": "Why is the sky blue?"}]}]
    deltas = list(model(extra_body=full_stop()).generate_stream(asked))
    assert "".join(delta.content or "" for delta in deltas)
    assert deltas[-1].token_usage.output_tokens > 0


@check
def an_agent_calls_tools_as_it_must():
    """The library asks for a call in each step; the demo model may never name the final answer."""
    agent = ToolCallingAgent(tools=[weather], model=model(), max_steps=2, verbosity_level=LogLevel.OFF)
    agent.run("What is the weather in Paris?")
    calls = [call.name for step in agent.memory.steps for call in getattr(step, "tool_calls", None) or ()]
    assert calls
    assert set(calls) <= {"weather", "final_answer"}


@check
def an_agent_that_writes_python_goes_round():
    """The demo model's Python need not run; each step's error goes back into its prompt."""
    agent = CodeAgent(tools=[], model=model(), max_steps=2, verbosity_level=LogLevel.OFF)
    agent.run("What is 2 + 2?")
    taken = [step for step in agent.memory.steps if getattr(step, "model_output", None)]
    assert taken
    assert all(step.token_usage.input_tokens > 500 for step in taken)


@check
def errors_come_through():
    with raises(openai.NotFoundError, AgentError):
        other = OpenAIServerModel(model_id="no-such-model", api_base=f"{URL}/v1", api_key="none")
        other.generate([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}])
