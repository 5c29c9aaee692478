"""Pydantic models of the /v1/messages responses and errors, for the OpenAPI description and tests."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class MessageUsage(BaseModel):
    """Token counts; `input_tokens` excludes cached and newly cached tokens."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int
    service_tier: Literal["standard", "batch"]


class MessageObject(BaseModel):
    """Message object; `content` holds blocks of type text, thinking and tool_use."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class MessageTokens(BaseModel):
    """Token count of a Messages API request."""

    input_tokens: int


class MessageFailure(BaseModel):
    """Error detail in the Messages API's format."""

    type: str
    message: str


class MessageErrorAnswer(BaseModel):
    """Anthropic's error object."""

    type: Literal["error"]
    error: MessageFailure
