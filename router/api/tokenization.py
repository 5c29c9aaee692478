"""Handlers of /tokenize, /detokenize and /tokenizer_info in vLLM's format; their routes are in tokenization_routes."""

from __future__ import annotations

from functools import partial
from typing import Any

from pydantic import StrictBool

from kvferry.protocol.errors import InvalidRequest
from kvferry.router.api.bodies.chat_prompt import ChatPrompt
from kvferry.router.api.bodies.fields import Detokenized, Messages
from kvferry.router.api.bodies.reader import parsed
from kvferry.router.api.bodies.request_body import RequestBody
from kvferry.router.api.served_models import ServedModels
from kvferry.router.text.encoding import LONG_CHARS, Bound


class TokenizeBody(ChatPrompt):
    """Body of POST /tokenize: a prompt, or messages to render first."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: StrictBool | None = None
    return_token_strs: StrictBool | None = False

    def check(self) -> None:
        """Raise InvalidRequest unless exactly one of prompt and messages is given."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")


class DetokenizeBody(RequestBody):
    """Body of POST /detokenize."""

    tokens: Detokenized


async def tokenize(pools: ServedModels, data: bytes, tenant: str) -> dict[str, Any]:
    """Return the token ids of a prompt, or of messages in the chat template; raise InvalidRequest."""
    body = await parsed(TokenizeBody, data)
    pool = pools.pool(body.model)
    if body.prompt is not None:
        field, text, marked = "prompt", body.prompt, body.add_special_tokens is not False
    else:
        asked = await pool.encoder.beside(body.rendering, pool.text, body.messages or [], body.tools)
        text = await pool.renderer.render(asked, tenant)
        field, marked = "messages", bool(body.add_special_tokens)
    bound = Bound(pool.max_model_len, field, truncated=True)
    (tokens,) = await pool.encoder.encode([text], bound, add_special_tokens=marked)
    return {
        "count": len(tokens),
        "max_model_len": pool.max_model_len,
        "tokens": tokens,
        "token_strs": [pool.text.tokenizer.token(token) for token in tokens] if body.return_token_strs else None,
    }


def describe(pools: ServedModels) -> dict[str, Any]:
    """Return the tokenizer facts of the first model that vLLM's clients read."""
    pool = pools.first
    template = pool.text.template
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": pool.max_model_len,
        "vocab_size": pool.text.facts.vocab_size,
        "chat_template": None if template is None else template.source,
        **{"bos_token": None, "eos_token": None, **({} if template is None else template.special_tokens)},
    }


async def detokenize(pools: ServedModels, data: bytes) -> dict[str, Any]:
    """Return the text of token ids, special tokens included; raise InvalidRequest."""
    body = await parsed(DetokenizeBody, data)
    pool = pools.pool(body.model)
    pool.check_ids(body.tokens, "tokens")
    decode = partial(pool.text.tokenizer.decode, skip_special_tokens=False)
    long = len(body.tokens) >= LONG_CHARS
    return {"prompt": await pool.encoder.beside(decode, body.tokens) if long else decode(body.tokens)}
