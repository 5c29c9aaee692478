"""Types of the fields of request bodies, and the groups of fields that do nothing but be there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field

from protocol.sampling import MAX_LOGPROBS

MAX_STOPS, MAX_STOP_CHARS = 64, 1024

Prompt = str | tuple[int, ...]


def _prompts(value: Any) -> list[Prompt]:
    """Text, token ids, or a list of either, as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of lists of token ids")
    if _is_ids(value):
        return [tuple(value)]
    if all(isinstance(item, str) or (isinstance(item, list) and _is_ids(item)) for item in value):
        return [item if isinstance(item, str) else tuple(item) for item in value]
    raise ValueError("its items must all be strings, all token ids, or all lists of token ids")


def _is_ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError("must be a string or a list of strings, none of them empty")
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"takes at most {MAX_STOPS} strings of at most {MAX_STOP_CHARS} characters")
    return stops


def _messages(value: Any) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ValueError("must be a list of at least one message")
    for place, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {place} must be an object with a role")
        if not isinstance(message.get("content"), str | list | None):
            raise ValueError(f"content of message {place} must be a string or a list of parts")
        if not isinstance(message.get("tool_calls"), list | None):
            raise ValueError(f"tool_calls of message {place} must be a list")
    return value


Prompts = Annotated[list[Any], BeforeValidator(_prompts)]
Stops = Annotated[list[str], BeforeValidator(_stops)]
Messages = Annotated[list[Any], BeforeValidator(_messages)]


def unbuilt(what: str) -> BeforeValidator:
    """For a field that asks for what this server cannot do yet."""

    def refuse(value: Any) -> Any:
        if value:
            raise ValueError(f"{what} not supported by this server")
        return value

    return BeforeValidator(refuse)


Structured = Annotated[Any, unbuilt("structured outputs are")]
Functions = Annotated[Any, unbuilt("functions (and tools) are")]
Top = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class SamplingFields(BaseModel):
    """What `SamplingParams` takes over by the same name; it knows the bounds."""

    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = False
    prompt_logprobs: int | None = None


class UnbuiltFields(BaseModel):
    """What this server cannot do yet, and refuses where it is asked for."""

    use_beam_search: Annotated[Any, unbuilt("beam search is")] = False
    guided_json: Structured = None
    guided_regex: Structured = None
    guided_choice: Structured = None
    guided_grammar: Structured = None
    structured_outputs: Structured = None
    logits_processors: Annotated[Any, unbuilt("custom logits processors are")] = None
    allowed_token_ids: Annotated[Any, unbuilt("allowed_token_ids is")] = None
    bad_words: Annotated[Any, unbuilt("bad_words is")] = None
