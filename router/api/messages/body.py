"""Bodies of POST /v1/messages and /v1/messages/count_tokens; unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StrictBool, StrictFloat

from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.sampling import MAX_COUNT
from kvferry.router.api.bodies.fields import MAX_ITEMS, MAX_MESSAGES, Integer, Objects, Stops, fail_with
from kvferry.router.api.bodies.request_body import RequestBody
from kvferry.router.api.bodies.tools import MAX_TOOLS
from kvferry.router.api.bodies.unsupported_fields import Unsupported

Content = Annotated[str | Objects, fail_with(f"must be a string or a list of at most {MAX_ITEMS} blocks")]


class CacheControl(BaseModel):
    """Mark of a block up to which the prompt is cached; here the whole prompt always is."""

    type: Literal["ephemeral"]
    ttl: Annotated[Literal["5m", "1h"], fail_with("must be 5m or 1h")] | None = None


class Turn(BaseModel):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content


class Tool(BaseModel):
    """A tool that the client executes."""

    name: Annotated[str, Field(min_length=1)]
    type: Annotated[Literal["custom"] | None, fail_with("only tools of the client's own (custom) are supported")] = None
    description: str | None = None
    input_schema: dict[str, Any]
    strict: StrictBool | None = None
    cache_control: CacheControl | None = None


class ToolChoice(BaseModel):
    """Choice of tools; `name` is given with type tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: StrictBool | None = None


class Thinking(BaseModel):
    """Extended-thinking settings; budget_tokens bounds the reasoning of models whose reasoning a token ends."""

    type: Annotated[Literal["enabled", "disabled", "adaptive"], fail_with("must be enabled, disabled or adaptive")]
    budget_tokens: Annotated[Integer, Field(ge=1, le=MAX_COUNT)] | None = None


class OutputConfig(BaseModel):
    """Output settings; `format` is of type json_schema and holds the schema."""

    format: dict[str, Any] | None = None
    effort: str | None = None


class CountBody(RequestBody):
    """Body of POST /v1/messages/count_tokens: the fields that define the prompt."""

    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Content | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    mcp_servers: Annotated[Any, Unsupported("calling MCP servers is")] = None

    def longest_ttl(self) -> str | None:
        """Return the longest time for which a part of the prompt should stay cached; None if no part has one."""
        contents = [self.system, *(turn.content for turn in self.messages)]
        blocks = [block for content in contents if isinstance(content, list) for block in content]
        marks = [self.cache_control, *(tool.cache_control for tool in self.tools or ())]
        found = {mark.ttl for mark in marks if mark} | {_ttl(block.get("cache_control")) for block in blocks}
        return "1h" if "1h" in found else "5m" if "5m" in found else None


def _ttl(mark: Any) -> str | None:
    """Return the time of a block's mark; raise InvalidRequest for one that the API does not know."""
    ttl = mark.get("ttl") if isinstance(mark, dict) else None
    if ttl not in (None, "5m", "1h"):
        raise InvalidRequest(f"cache_control.ttl must be 5m or 1h, got {ttl!r}", param="cache_control.ttl")
    return str(ttl) if ttl else None


class MessagesBody(CountBody):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[Integer, Field(ge=1, le=MAX_COUNT)]
    stop_sequences: Stops = Field(default_factory=list)
    stream: StrictBool | None = False
    temperature: StrictFloat | None = None
    top_p: StrictFloat | None = None
    top_k: Annotated[Integer, Field(ge=-1, le=MAX_COUNT)] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Annotated[Literal["auto", "standard_only"], fail_with("must be auto or standard_only")] | None = None
    container: Annotated[Any, Unsupported("running code in containers is")] = None
