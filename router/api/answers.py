"""Pydantic models of the OpenAI endpoints' responses and errors, for the OpenAPI description and tests."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Error(BaseModel):
    """OpenAI's error object; `param` names the invalid field."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(BaseModel):
    """Error response."""

    error: Error


class Usage(BaseModel):
    """Token counts; `prompt_tokens_details.cached_tokens` counts prompt tokens that were not computed again.

    `image_tokens`, `audio_tokens` and `video_tokens` beside it are those that stand for media, where there are any."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int] = Field(
        default={}, description="reasoning_tokens, of a model that marks its reasoning"
    )


class CalledFunction(BaseModel):
    """Called function; `arguments` is the JSON text of an object, possibly cut if the answer reached its length."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """Call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(BaseModel):
    """Assistant message; `reasoning` and `reasoning_content` hold the same text for different clients."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str = Field(default="", description="of a model that marks its reasoning")
    reasoning: str = Field(default="", description="the same")
    tool_calls: list[ToolCall] = Field(default=[], description="where tools are called; content may be null then")
    function_call: CalledFunction | None = Field(
        default=None, description="where functions were given instead of tools"
    )


class ChatChoice(BaseModel):
    """One choice of a chat completion."""

    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: list[int] = Field(default=[], description="with return_token_ids")


class CompletionChoice(BaseModel):
    """One choice of a completion."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str
    stop_reason: str | int | None
    prompt_logprobs: list[dict[str, Any] | None] = Field(default=[], description="with prompt_logprobs")
    prompt_token_ids: list[int] = Field(default=[], description="with return_token_ids")
    token_ids: list[int] = Field(default=[], description="with return_token_ids")


class ChatAnswer(BaseModel):
    """Chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str = Field(description="names the configuration of model, nodes and parsers")
    service_tier: str = Field(default="", description="the tier that was used, if the request names one")
    prompt_logprobs: list[dict[str, Any] | None] = Field(default=[], description="with prompt_logprobs")
    prompt_token_ids: list[int] = Field(default=[], description="with return_token_ids")


class CompletionAnswer(BaseModel):
    """Text completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str = Field(description="names the configuration of model, nodes and parsers")
    service_tier: str = Field(default="", description="the tier that was used, if the request names one")


class Model(BaseModel):
    """Served model; `input_modalities` are text, and the media (image, audio, video) that some node takes."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    input_modalities: list[str]
    transcription: bool = Field(description="whether POST /v1/audio/transcriptions takes the model")


class ModelList(BaseModel):
    """List of served models."""

    object: Literal["list"]
    data: list[Model]


class TokenPiece(BaseModel):
    """Token with its text, or with its bytes where those are no text."""

    id: int
    piece: str | list[int]


class Tokens(BaseModel):
    """Token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int] | list[TokenPiece]
    token_strs: list[str] | None


class Text(BaseModel):
    """Text of token ids, under the names of vLLM (`prompt`) and llama.cpp (`content`)."""

    prompt: str
    content: str


class TokenizerInfo(BaseModel):
    """Tokenizer facts as in a tokenizer_config.json, with further special tokens by their names."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str
    model_max_length: int
    vocab_size: int
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None


class Health(BaseModel):
    """Liveness of the router process."""

    status: str


class Ready(BaseModel):
    """Readiness: nodes that can take a request now, by role for all models and for each model."""

    status: str
    nodes: dict[str, int]
    models: dict[str, dict[str, int]]


class Targets(BaseModel):
    """Scrape targets in Prometheus' HTTP discovery format."""

    targets: list[str]
    labels: dict[str, str]


class Version(BaseModel):
    """Version of the router."""

    version: str
