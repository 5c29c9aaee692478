"""Routes that show a request's rendered prompt without running it: /apply-template, and /render below two endpoints."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from kvferry.protocol.sampling import SamplingParams
from kvferry.router.api.admission import ADAPTED
from kvferry.router.api.bodies.completions import CompletionBody
from kvferry.router.api.bodies.generating import ChatBody, GenerationBody
from kvferry.router.api.bodies.reader import BodyReader, parsed
from kvferry.router.api.documentation import errors, takes
from kvferry.router.api.served_models import ServedModels
from kvferry.router.request_context import CALL, RequestContext
from kvferry.runtime.disconnect import until_disconnect

_SHOWN = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty",
    "presence_penalty", "logprobs", "prompt_logprobs", "ignore_eos",
)  # fmt: skip
"""Sampling parameters that vLLM has under the same name, with a single value."""
Show = Callable[[ServedModels, RequestContext, Any, int], Awaitable[Any]]
"""Returns the answer, given served models, context, body and the body's size in bytes."""


class AppliedTemplate(BaseModel):
    """Text of a rendered chat."""

    prompt: str


class RenderedRequest(BaseModel):
    """What a request becomes, in the form that vLLM's /inference/v1/generate takes; `prompt` is the text."""

    request_id: str
    prompt: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    model: str
    stream: bool
    cache_salt: str | None
    priority: int


def rendering_routes(pools: ServedModels, reader: BodyReader, statuses: Sequence[int]) -> APIRouter:
    """Return the routes; `statuses` are those of their errors."""
    router = APIRouter(responses=errors(*statuses))

    def add(path: str, summary: str, body: type[GenerationBody], answer: Any, show: Show) -> None:
        async def shown(request: Request, response: Response) -> Any:
            call, data = request.scope[CALL], await reader.read(request)
            request_body = await parsed(body, data)
            found = await until_disconnect(request.receive, show(pools, call, request_body, len(data)))
            if request_body.adaptations:
                response.headers[ADAPTED] = ", ".join(request_body.adaptations)
            return found

        router.post(path, summary=summary, response_model=answer, openapi_extra=takes(body))(shown)

    add("/apply-template", "Render a chat to text", ChatBody, AppliedTemplate, applied)
    chat, texts = "/v1/chat/completions/render", "/v1/completions/render"
    add(chat, "Render a chat to text and token ids", ChatBody, RenderedRequest, rendered_chat)
    add(texts, "Encode prompts", CompletionBody, list[RenderedRequest], rendered)
    return router


async def applied(pools: ServedModels, call: RequestContext, body: GenerationBody, size: int) -> dict[str, Any]:
    """Return the text of a chat's prompt; raise InvalidRequest."""
    (prompt,) = await pools.pool(body.model).prompts(body, call.tenant, size)
    return {"prompt": prompt}


async def rendered_chat(pools: ServedModels, call: RequestContext, body: GenerationBody, size: int) -> dict[str, Any]:
    """Return a chat's prompt. See `rendered`."""
    return (await rendered(pools, call, body, size))[0]


async def rendered(pools: ServedModels, call: RequestContext, body: GenerationBody, size: int) -> list[dict[str, Any]]:
    """Return each prompt of a body with its token ids and sampling parameters; raise InvalidRequest."""
    pool = pools.pool(body.model)
    prompts = await pool.prompts(body, call.tenant, size)
    specs = await pool.specs(call, body, size)
    found = []
    for prompt, spec in zip(prompts, specs, strict=True):
        text = prompt if isinstance(prompt, str) else pool.text.tokenizer.decode(prompt, skip_special_tokens=False)
        found.append(
            {
                "request_id": spec.request_id,
                "prompt": text,
                "token_ids": list(spec.token_ids),
                "sampling_params": _shown(spec.params, body),
                "model": pool.name,
                "stream": bool(body.stream),
                "cache_salt": body.cache_salt,
                "priority": body.priority or 0,
            }
        )
    return found


def _shown(params: SamplingParams, body: GenerationBody) -> dict[str, Any]:
    """Return sampling parameters under vLLM's names."""
    return {
        **{name: getattr(params, name) for name in _SHOWN},
        "n": body.n or 1,
        "seed": body.seed,
        "stop": list(body.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "logit_bias": {str(token): bias for token, bias in params.logit_bias} or None,
        "allowed_token_ids": None if params.allowed_token_ids is None else list(params.allowed_token_ids),
        "skip_special_tokens": body.skip_special_tokens is not False,
        "include_stop_str_in_output": bool(body.include_stop_str_in_output),
    }
