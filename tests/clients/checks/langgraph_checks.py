"""LangGraph's agents over chat completions: graphs whose model calls tools, streams and remembers."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal, TypedDict

import openai
from harness import MODEL, URL, check, full_stop, raises
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode, tools_condition

ASK = ("user", "What is the weather in Paris?")


@tool
def weather(city: Literal["London", "Paris"]) -> str:
    """The weather of a city."""
    return f"clear in {city}"


class State(TypedDict):
    messages: Annotated[list, add_messages]


def model(**more):
    body = more.pop("extra_body", full_stop())
    return ChatOpenAI(
        model=MODEL, base_url=f"{URL}/v1", api_key="none", temperature=0, max_tokens=120, max_retries=0,
        extra_body=body, **more,
    )  # fmt: skip


def graph(*, always=False, checkpointer=None, **more):
    """An agent that must call a tool first, and later as well if `always`; else it then answers in text."""
    forced = model(extra_body={}, **more).bind_tools([weather], tool_choice="required")
    free = model(**more).bind_tools([weather], tool_choice="none")

    def think(state):
        called = any(message.type == "tool" for message in state["messages"])
        return {"messages": [(free if called and not always else forced).invoke(state["messages"])]}

    built = StateGraph(State)
    built.add_node("think", think)
    built.add_node("tools", ToolNode([weather]))
    built.add_edge(START, "think")
    built.add_conditional_edges("think", tools_condition)
    built.add_edge("tools", "think")
    return built.compile(checkpointer=checkpointer)


def kinds(messages):
    return [message.type for message in messages]


@check
def a_tool_is_called_and_its_result_read():
    messages = graph().invoke({"messages": [ASK]})["messages"]
    assert kinds(messages)[:2] == ["human", "ai"]
    assert kinds(messages)[-2:] == ["tool", "ai"]
    assert messages[-2].content.startswith("clear in ")
    assert messages[-1].content


@check
def its_tokens_are_streamed():
    parts = [part for part, about in graph().stream({"messages": [ASK]}, stream_mode="messages")]
    texts = [part.content for part in parts if part.type == "AIMessageChunk" and part.content]
    assert len(texts) > 2
    assert any(getattr(part, "tool_call_chunks", None) for part in parts)


@check
def a_thread_is_remembered():
    agent, thread = graph(checkpointer=InMemorySaver()), {"configurable": {"thread_id": "a"}}
    first = agent.invoke({"messages": [ASK]}, thread)["messages"]
    second = agent.invoke({"messages": [("user", "And in London?")]}, thread)["messages"]
    assert len(second) == len(first) + 2
    usage = second[-1].usage_metadata
    assert usage["input_token_details"]["cache_read"] > 0


@check
def an_agent_that_never_ends_is_stopped_by_its_graph():
    with raises(GraphRecursionError):
        graph(always=True).invoke({"messages": [ASK]}, {"recursion_limit": 5})


@check
def the_responses_api_serves_a_graph():
    messages = graph(use_responses_api=True).invoke({"messages": [ASK]})["messages"]
    assert kinds(messages)[-2:] == ["tool", "ai"]


@check
async def agents_run_side_by_side():
    agent = graph()
    ended = await asyncio.gather(*(asyncio.to_thread(agent.invoke, {"messages": [ASK]}) for _ in range(4)))
    assert all(kinds(each["messages"])[-2:] == ["tool", "ai"] for each in ended)


@check
def errors_come_through():
    with raises(openai.BadRequestError):
        graph().invoke({"messages": [("user", "7" * 20_000)]})
