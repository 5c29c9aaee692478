"""Bodies of requests: the fields of the OpenAI API and vLLM's extensions. Unknown fields are ignored.

Fields whose function is not built are declared too, so that `reject_unbuilt` can refuse them by name where ignoring
them would change the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from protocol.errors import InvalidRequest

MAX_CHOICES = 128
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


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore")


class StreamOptions(_Body):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerationBody(_Body):
    """What chat and completions share. None means the default everywhere."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
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
    stop: Stops = []
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = False
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None

    best_of: int | None = None
    response_format: dict[str, Any] | None = None
    use_beam_search: bool | None = False
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    logits_processors: Any = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None


class CompletionBody(GenerationBody):
    """POST /v1/completions. `prompt` becomes a list of texts and tuples of token ids."""

    prompt: Prompts
    echo: bool | None = False
    logprobs: int | None = None
    add_special_tokens: bool | None = True

    suffix: str | None = None
    prompt_embeds: Any = None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    add_special_tokens: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None

    echo: bool | None = False
    chat_template: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None


class TokenizeBody(_Body):
    """POST /tokenize: a prompt, or messages to render first."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = False


class DetokenizeBody(_Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


Body = TypeVar("Body", bound=_Body)


def parse(kind: type[Body], data: bytes) -> Body:
    """The body that `data` spells in JSON. Raises InvalidRequest naming the first field at fault."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            raise InvalidRequest(f"the request body is not valid JSON: {first['msg']}") from None
        if not first["loc"]:
            raise InvalidRequest("the request body must be a JSON object") from None
        param = _field_path(first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"{param}: {reason}", param=param) from None


def _field_path(loc: tuple[int | str, ...]) -> str:
    """`messages[0].role` from ("messages", 0, "role")."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


_UNBUILT = {
    "use_beam_search": "beam search is",
    "guided_json": "structured outputs are",
    "guided_regex": "structured outputs are",
    "guided_choice": "structured outputs are",
    "guided_grammar": "structured outputs are",
    "structured_outputs": "structured outputs are",
    "logits_processors": "custom logits processors are",
    "allowed_token_ids": "allowed_token_ids is",
    "bad_words": "bad_words is",
    "suffix": "inserting before a suffix is",
    "prompt_embeds": "prompt embeddings are",
    "functions": "functions (and tools) are",
    "function_call": "functions (and tools) are",
    "audio": "audio is",
    "web_search_options": "web search is",
    "chat_template": "a chat template in the request is",
}


def reject_unbuilt(body: GenerationBody) -> None:
    """Raise InvalidRequest for a field that asks for what this server cannot do yet."""
    for name, what in _UNBUILT.items():
        if getattr(body, name, None):
            raise InvalidRequest(f"{name}: {what} not supported by this server", param=name)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest("best_of: only best_of equal to n is supported by this server", param="best_of")
    kind = (body.response_format or {}).get("type", "text")
    if kind != "text":
        raise InvalidRequest(f"response_format: type {kind!r} is not supported, only 'text'", param="response_format")
    if isinstance(body, ChatBody):
        _reject_unbuilt_chat(body)


def _reject_unbuilt_chat(body: ChatBody) -> None:
    choice = body.tool_choice or ("auto" if body.tools else "none")
    if choice != "none" and (body.tools or choice != "auto"):
        raise InvalidRequest(
            "tool_choice: calling tools is not supported by this server; with tool_choice 'none' the tools are shown "
            "to the model and it answers in text",
            param="tool_choice" if body.tool_choice else "tools",
        )
    if body.echo:
        raise InvalidRequest("echo: not supported by this server for chat", param="echo")
    if set(body.modalities or ()) - {"text"}:
        raise InvalidRequest("modalities: only 'text' is supported by this server", param="modalities")
