"""Body of POST /v1/responses; unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StrictBool

from kvferry.protocol.errors import InvalidRequest
from kvferry.router.api.bodies.fields import (
    MAX_ITEMS,
    CacheSalt,
    Count,
    Kwargs,
    Name,
    Objects,
    SamplingFields,
    TierFields,
    Top,
    fail_with,
)
from kvferry.router.api.bodies.request_body import RequestBody
from kvferry.router.api.bodies.session_fields import SessionFields
from kvferry.router.api.bodies.tools import MAX_TOOLS

LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that requests log-probabilities."""
MAX_INCLUDED = 64
"""Largest number of entries in `include`."""
MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512
"""Largest number of metadata entries, and longest key and value in characters; responses repeat and store them."""
Key = Annotated[str, Field(max_length=MAX_KEY)]
Metadata = Annotated[dict[Key, Annotated[str, Field(max_length=MAX_VALUE)]], Field(max_length=MAX_METADATA)]


class TextField(BaseModel):
    """Text settings; `format` is of type text, json_object, or json_schema with a name and schema."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningField(BaseModel):
    """Reasoning settings."""

    effort: str | None = None
    summary: str | None = None


class ResponsesBody(SamplingFields, TierFields, SessionFields, RequestBody):
    """Body of POST /v1/responses."""

    input: Annotated[str | Objects, fail_with(f"must be a string or a list of at most {MAX_ITEMS} items")] = ""
    instructions: str | None = None
    previous_response_id: Name | None = None
    store: StrictBool | None = None
    background: StrictBool | None = None
    stream: StrictBool | None = False
    text: TextField | None = None
    tools: Annotated[Objects, Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[str | dict[str, Any] | None, fail_with("must be a string or an object")] = None
    parallel_tool_calls: StrictBool | None = None
    max_output_tokens: Count | None = None
    top_logprobs: Top | None = None
    include: Annotated[list[Name], Field(max_length=MAX_INCLUDED)] | None = None
    reasoning: ReasoningField | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    user: Annotated[str, Field(max_length=MAX_VALUE)] | None = None
    chat_template_kwargs: Kwargs | None = None
    cache_salt: CacheSalt | None = None
    conversation: Any = Field(None, description="not supported by this server: use previous_response_id")
    prompt: Any = Field(None, description="stored prompts are not supported by this server")

    def check(self) -> None:
        """Raise InvalidRequest for unsupported fields and for fields that exclude each other."""
        for field, instead in (("conversation", "; use previous_response_id"), ("prompt", "")):
            if getattr(self, field):
                raise InvalidRequest(f"{field} is not supported by this server{instead}", param=field)
        if self.background and self.stream:
            raise InvalidRequest("background responses cannot be streamed by this server", param="background")
        if self.background and self.store is False:
            raise InvalidRequest("background needs store: its response is fetched later", param="background")
        if not self.input and not self.previous_response_id:
            raise InvalidRequest("input must hold at least one item", param="input")

    @property
    def shows_logprobs(self) -> bool:
        """Return whether the response shows log-probabilities."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)
