"""Request bodies of vLLM's API of token ids: parsing and validation; unsupported fields are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.sampling import MAX_ALLOWED, MAX_BAD_WORDS, MAX_COUNT, MAX_LOGIT_BIAS

MAX_VALUES = 2**21
"""Maximum number of values in a body, since each takes many times its length in memory."""
MAX_STOP_IDS, MAX_NAME, MAX_SALT, MAX_ABORTS = 1024, 256, 1024, 4096

IGNORED_PARAMS = frozenset(
    (
        "detokenize",
        "flat_logprobs",
        "include_stop_str_in_output",
        "output_kind",
        "skip_special_tokens",
        "spaces_between_special_tokens",
    )
)
"""Sampling parameters that have no effect on token ids."""
NEUTRAL_PARAMS: Mapping[str, tuple[Any, ...]] = {
    "extra_args": (None, {}),
    "logits_processors": (None, []),
    "n": (None, 1),
    "skip_clone": (None, False),
    "skip_reading_prefix_cache": (None, False),
    "stop": (None, "", []),
    "thinking_token_budget": (None,),
    "truncate_prompt_tokens": (None,),
}
"""Sampling parameters of vLLM that are accepted only with these values, which have no effect."""
NEUTRAL_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "content_parts": (None, []),
    "ec_transfer_params": (None, {}),
    "features": (None, {}),
    "kv_transfer_params": (None, {}),
    "output_mode": (None, "tokens"),
    "reasoning_ended": (None, True),
    "reasoning_parser_kwargs": (None, {}),
}
"""Fields of vLLM's body that are accepted only with these values, which have no effect."""

Number = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenIds = Annotated[list[Number], Field(fail_fast=True)]
Body = TypeVar("Body", bound=BaseModel)


class SamplingBody(BaseModel):
    """Sampling parameters by vLLM's names; None: the default. `SamplingParams` checks their bounds."""

    model_config = ConfigDict(extra="forbid", strict=True)

    max_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    min_tokens: Number | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Number | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Number | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    logprobs: Number | None = None
    prompt_logprobs: Number | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    allowed_token_ids: Annotated[TokenIds, Field(max_length=MAX_ALLOWED)] | None = None
    bad_words: Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_BAD_WORDS)] | None = None
    structured_outputs: dict[str, Any] | None = None


class StreamOptions(BaseModel):
    """Options of a stream: usage in a chunk at its end, and in each chunk."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerateBody(BaseModel):
    """Body of POST /inference/v1/generate. `priority` and `token_offsets` have no effect."""

    model_config = ConfigDict(extra="forbid", strict=True)

    token_ids: Annotated[TokenIds, Field(min_length=1)]
    sampling_params: SamplingBody
    request_id: Annotated[str, Field(min_length=1, max_length=MAX_NAME)] | None = None
    model: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT)] | None = None
    priority: Number | None = 0
    return_token_ids: bool | None = None
    token_offsets: list[Any] | None = None


class AbortBody(BaseModel):
    """Body of POST /abort_requests: ids as clients sent them, or as answers show them."""

    model_config = ConfigDict(extra="forbid", strict=True)

    request_ids: Annotated[list[str], Field(fail_fast=True, max_length=MAX_ABORTS)]


def read_generate(data: bytes | bytearray) -> GenerateBody:
    """Return the body of a generate request; raise InvalidRequest naming the first invalid field."""
    value = _json(data)
    if isinstance(value, dict):
        value = _supported(value, NEUTRAL_FIELDS, "")
        if isinstance(params := value.get("sampling_params"), dict):
            params = {name: each for name, each in params.items() if name not in IGNORED_PARAMS}
            value["sampling_params"] = _supported(params, NEUTRAL_PARAMS, "sampling_params.")
    body = _build(GenerateBody, value)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    if body.stream and body.sampling_params.prompt_logprobs is not None:
        name = "sampling_params.prompt_logprobs"
        raise InvalidRequest(f"{name} cannot be streamed", param=name)
    return body


def read_abort(data: bytes | bytearray) -> AbortBody:
    """Return the body of an abort request; raise InvalidRequest naming the first invalid field."""
    return _build(AbortBody, _json(data))


def _json(data: bytes | bytearray) -> Any:
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_VALUES:
        raise InvalidRequest(f"the request body holds more than {MAX_VALUES} values")
    try:
        return from_json(bytes(data))
    except ValueError as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from None


def _supported(value: dict[str, Any], neutral: Mapping[str, tuple[Any, ...]], place: str) -> dict[str, Any]:
    """Return the fields without those of `neutral`; raise InvalidRequest if one has a value that is not accepted."""
    for name, accepted in neutral.items():
        if name in value and value[name] not in accepted:
            refused = f"{place}{name} is not supported by this node"
            raise InvalidRequest(f"{refused}, except {' or '.join(map(repr, accepted))}", param=place + name)
    return {name: each for name, each in value.items() if name not in neutral}


def _build(kind: type[Body], value: Any) -> Body:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        if not first["loc"]:
            raise InvalidRequest("the request body must be a JSON object") from None
        param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
        reason = "is not supported" if first["type"] == "extra_forbidden" else first["msg"]
        raise InvalidRequest(f"{param}: {reason}", param=param) from None
