"""Field types with their bounds, and field groups (sampling, priority tier, stream options), for request bodies."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Container, Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    StrictBool,
    StrictFloat,
    StrictInt,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    with_config,
)
from pydantic_core import PydanticKnownError, core_schema
from typing_extensions import TypedDict

from kvferry.protocol.sampling import MAX_ALLOWED, MAX_BAD_WORDS, MAX_COUNT, MAX_LOGPROBS
from kvferry.router.api.bodies.sliced_json import Numbers
from kvferry.router.text.text_model import ROLES

MAX_STOPS, MAX_STOP_CHARS = 64, 1024
MAX_BIASES, MAX_STOP_IDS = 300, 1024
MAX_BAD_WORD_CHARS = 256
MAX_MESSAGES = 8192
"""Largest number of messages in a chat."""
MAX_PROMPTS = 2048
"""Largest number of prompts in a completion request."""
MAX_ITEMS = 8192
"""Largest number of items in a list of objects: documents, items, blocks."""
MAX_KWARGS = 64
"""Largest number of entries in an object of keyword arguments."""
MAX_DETOKENIZED = 2**18
"""Largest number of token ids to detokenize."""
TIER_PRIORITY = {"priority": -1, "flex": 1}
"""Priority among a tenant's own requests by tier, where the body gives none; lower is served earlier."""
MAX_NAME = 256
"""Longest name or id, in characters."""


def _integral(value: Any) -> Any:
    """Convert 40.0 to 40, since JSON does not distinguish them."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[StrictInt, BeforeValidator(_integral)]
"""A number of a request body; neither a boolean nor a number in a string."""

_INTEGERS = frozenset((int,))

Prompt = str | tuple[int, ...]


def _prompts(value: Any) -> list[Prompt]:
    """Convert text, token ids, or a list of either to a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of lists of token ids")
    if _is_ids(value):
        return [tuple(value)]
    if len(value) > MAX_PROMPTS and not isinstance(value[0], int):
        raise ValueError(f"takes at most {MAX_PROMPTS} prompts, got {len(value)}")
    if all(isinstance(item, str) or (isinstance(item, list) and _is_ids(item)) for item in value):
        return [item if isinstance(item, str) else tuple(item) for item in value]
    raise ValueError("its items must all be strings, all token ids, or all lists of token ids")


def _is_ids(value: list[Any]) -> bool:
    return isinstance(value, Numbers) or _INTEGERS.issuperset(map(type, value))


def _integers(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Check a list of numbers; without a call for each if all are small integers, as usual."""
    if isinstance(value, list) and len(value) > MAX_DETOKENIZED:
        bounds = {"field_type": "List", "max_length": MAX_DETOKENIZED, "actual_length": len(value)}
        raise PydanticKnownError("too_long", bounds)
    if isinstance(value, list) and _is_ids(value):
        with contextlib.suppress(OverflowError):
            array("q", value)
            return list(value)
    return check(value)


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return []
    if isinstance(stops, list) and len(stops) > MAX_STOPS:
        raise ValueError(f"takes at most {MAX_STOPS} strings of at most {MAX_STOP_CHARS} characters")
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError("must be a string or a list of strings, none of them empty")
    if any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"takes at most {MAX_STOPS} strings of at most {MAX_STOP_CHARS} characters")
    return stops


def _list_of(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "array", "items": item, "minItems": 1} for item in items]


_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
Prompts = Annotated[
    list[Any], BeforeValidator(_prompts), WithJsonSchema({"anyOf": [_TEXT, _IDS, *_list_of(_TEXT, _IDS)]})
]
_STOP = {**_TEXT, "maxLength": MAX_STOP_CHARS}
_STOPS = {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}
Stops = Annotated[
    list[str], BeforeValidator(_stops), WithJsonSchema({"anyOf": [_STOP, _STOPS, {"type": "null"}], "default": []})
]


def _biases(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"takes at most {MAX_BIASES} tokens, got {len(value)}")
    return value


Count = Annotated[Integer, Field(ge=0, le=MAX_COUNT)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=256)]
Number = Annotated[Integer, Field(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
"""A token id that is the name of a JSON field, and therefore arrives as a string."""
Detokenized = Annotated[list[Number], Field(fail_fast=True, max_length=MAX_DETOKENIZED), WrapValidator(_integers)]
StopIds = Annotated[list[Number], Field(fail_fast=True, max_length=MAX_STOP_IDS)]
AllowedIds = Annotated[list[Number], Field(fail_fast=True, min_length=1, max_length=MAX_ALLOWED)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
BadWords = Annotated[list[BadWord], Field(fail_fast=True, max_length=MAX_BAD_WORDS // 2)]
Biases = Annotated[
    dict[TokenId, StrictFloat], BeforeValidator(_biases), WithJsonSchema({
        "type": "object", "maxProperties": MAX_BIASES, "additionalProperties": {"type": "number"},
        "propertyNames": {"pattern": "^[0-9]+$"},
    })
]  # fmt: skip
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_ITEMS)]
Name = Annotated[str, Field(max_length=MAX_NAME)]
Kwargs = Annotated[dict[str, Any], Field(max_length=MAX_KWARGS)]


def fail_with(must: str) -> GetPydanticSchema:
    """Report one error for a field of several types, instead of one for each type."""
    return GetPydanticSchema(
        lambda source, build: core_schema.custom_error_schema(build(source), "type", custom_error_message=must)
    )


@with_config(ConfigDict(extra="allow"))
class Message(TypedDict):
    """One message of a chat.

    The valid roles also depend on the model's template; `TextModel.render` checks them. Further fields are passed to
    the template."""

    role: Annotated[str, Field(description=f"{', '.join(ROLES)}, or a role that the model's chat template uses")]
    content: NotRequired[Annotated[str | list[Any] | None, fail_with("must be a string or a list of parts")]]
    tool_calls: NotRequired[list[Any] | None]


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


Top = Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)]


class SamplingFields(BaseModel):
    """Body fields that `SamplingParams` takes by the same name and whose bounds it checks."""

    min_tokens: Count | None = None
    temperature: StrictFloat | None = None
    top_p: StrictFloat | None = None
    top_k: Annotated[Integer, Field(ge=-1, le=MAX_COUNT)] | None = None
    min_p: StrictFloat | None = None
    repetition_penalty: StrictFloat | None = None
    frequency_penalty: StrictFloat | None = None
    presence_penalty: StrictFloat | None = None
    logit_bias: Biases | None = None
    seed: Number | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: StrictBool | None = False
    prompt_logprobs: Top | None = None
    allowed_token_ids: AllowedIds | None = None
    bad_words: BadWords | None = None


class StreamOptions(BaseModel):
    """Options of a stream: usage in its last chunk, or in each."""

    include_usage: StrictBool | None = False
    continuous_usage_stats: StrictBool | None = False


def field_path(loc: tuple[int | str, ...]) -> str:
    """Format an error location: `messages[0].role` for ("messages", 0, "role")."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def has_part(messages: Sequence[Mapping[str, Any]], types: Container[str]) -> bool:
    """Return whether a chat has a content part of one of these types."""
    return any(
        isinstance(part, dict) and isinstance(kind := part.get("type"), str) and kind in types
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
    )


class TierFields(BaseModel):
    """Fields of how urgent a request is. Of OpenAI's tiers `auto`, `default` and `scale` are served alike."""

    service_tier: (
        Annotated[
            Literal["auto", "default", "flex", "priority", "scale"],
            fail_with("must be auto, default, flex, priority or scale"),
        ]
        | None
    ) = None

    priority: Annotated[Integer, Field(ge=-MAX_COUNT, le=MAX_COUNT)] | None = None

    @property
    def is_background(self) -> bool:
        """Return whether nobody waits for the request (`flex`): its tenant's targets do not apply to it."""
        return self.service_tier == "flex"

    def tier_used(self, *, is_background: bool) -> str:
        """Return the tier that serves the request: flex, priority or default.

        is_background: it yields to other requests, as batch rows do, so that it has no priority."""
        if self.service_tier == "priority" and is_background:
            return "default"
        return self.service_tier if self.service_tier in TIER_PRIORITY else "default"
