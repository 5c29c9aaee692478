"""Pydantic models of the /v1/responses responses, for the OpenAPI description and tests."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class ResponseUsage(BaseModel):
    """Token usage of a response."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseFailure(BaseModel):
    """Error of a failed response."""

    code: str
    message: str


class ResponseObject(BaseModel):
    """Response object; `output` holds items of type message, function_call and reasoning."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete", "failed", "in_progress", "cancelled"]
    error: ResponseFailure | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage | None
    instructions: str | None
    previous_response_id: str | None
    background: bool
    store: bool = Field(description="whether the response is stored")
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, str | None]
    temperature: float
    top_p: float
    top_logprobs: int
    max_output_tokens: int | None
    truncation: Literal["auto", "disabled"]
    metadata: dict[str, str]
    service_tier: Literal["default", "flex", "priority"]
    user: str | None


class DeletedResponse(BaseModel):
    """Confirmation that a response was deleted."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(BaseModel):
    """Page of a response's input items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool
