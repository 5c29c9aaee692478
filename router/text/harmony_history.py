"""Converts conversations and tools for gpt-oss's (harmony) template; restores instructions in the rendered text.

Reasoning, each tool call with its result, and one first message of instructions have separate places. The
template rejects or drops everything else. Later instructions therefore pass through the template as a marked user
message, which becomes a developer message in the rendered text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Message = dict[str, Any]
_INSTRUCTIONS = ("system", "developer")
_USER, _DEVELOPER = "<|start|>user<|message|>", "<|start|>developer<|message|># Instructions\n\n"
"""Heads of messages of the harmony format."""


def channelled(messages: Sequence[Message], mark: str) -> list[Message]:
    """Return the messages, whose content is text, in the template's form; `mark` begins later instructions."""
    begun = next((place for place, each in enumerate(messages) if each.get("role") not in _INSTRUCTIONS), len(messages))
    instructions = [each["content"] for each in messages[:begun]]
    first = [{"role": "developer", "content": "\n\n".join(filter(None, instructions))}] if instructions else []
    return first + list(_turns([_marked(each, mark) for each in messages[begun:]]))


def with_instructions(text: str, mark: str) -> str:
    """Return the rendered text with each marked message turned into a developer message."""
    return text.replace(_USER + mark, _DEVELOPER).replace(mark, "")


def _marked(message: Message, mark: str) -> Message:
    if message.get("role") not in _INSTRUCTIONS:
        return message
    return {"role": "user", "content": mark + message["content"]}


def described(tools: Sequence[Any] | None) -> list[Any] | None:
    """Return the tools with a description each, as the template requires."""
    if tools is None:
        return None
    return [{**each, "function": {**each["function"], "description": _description(each["function"])}} for each in tools]


def _description(function: Any) -> str:
    return function.get("description") or ""


def _turns(messages: Sequence[Message]) -> Iterator[Message]:
    place = 0
    while place < len(messages):
        message, place = messages[place], place + 1
        if message.get("role") == "function":
            message = {**message, "role": "tool"}
        if message.get("role") != "assistant":
            yield message
            continue
        first = place
        while place < len(messages) and messages[place].get("role") in ("tool", "function"):
            place += 1
        yield from _turn(_with_thinking(message), messages[first:place])


def _with_thinking(message: Message) -> Message:
    """Move an assistant's reasoning to `thinking`, joined with the content if it has calls.

    The template accepts reasoning or content beside calls, both as thinking, and no empty list of calls."""
    if not message.get("tool_calls"):
        message = {name: value for name, value in message.items() if name != "tool_calls"}
    thoughts = message.get("reasoning_content")
    if not thoughts:
        return message
    if "tool_calls" not in message:
        return {**message, "thinking": thoughts}
    return {**message, "thinking": "\n".join(filter(None, (thoughts, message["content"]))), "content": ""}


def _turn(message: Message, results: Sequence[Message]) -> Iterator[Message]:
    """Yield an assistant's calls one by one, each with its results; results without an id follow in order."""
    calls, left = message.get("tool_calls") or (), list(results)
    if not calls:
        yield from (message, *left)
        return
    for place, call in enumerate(calls):
        own = {"thinking": "", "content": ""} if place else {}
        yield {**message, **own, "tool_calls": [call]}
        found = [each for each in left if each.get("tool_call_id") == call.get("id")] or left[:1]
        for result in found if place < len(calls) - 1 else left:
            yield {**result, "role": "tool"}
        left = [each for each in left if all(each is not result for result in found)]
