"""POST /tokenize and /detokenize, in vLLM's shapes: load tools count tokens with them."""

from __future__ import annotations

from typing import Any

from protocol.errors import InvalidRequest
from router.api.schemas import DetokenizeBody, TokenizeBody, parse
from router.api.serving import Serving


async def tokenize(serving: Serving, data: bytes) -> dict[str, Any]:
    """Token ids of a prompt, or of messages rendered by the chat template. Raises InvalidRequest."""
    body = parse(TokenizeBody, data)
    serving.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    if body.prompt is not None:
        (tokens,) = await serving.encode([body.prompt], add_special_tokens=body.add_special_tokens is not False)
    else:
        tokens = await serving.render(body)
    strings = [serving.text.tokenizer.token(token) for token in tokens] if body.return_token_strs else None
    return {
        "count": len(tokens),
        "max_model_len": serving.max_model_len,
        "tokens": tokens,
        "token_strs": strings,
    }


def detokenize(serving: Serving, data: bytes) -> dict[str, Any]:
    """The text of token ids, special tokens included. Raises InvalidRequest."""
    body = parse(DetokenizeBody, data)
    serving.check_model(body.model)
    vocabulary = serving.text.facts.vocab_size
    if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < vocabulary:
        raise InvalidRequest(f"tokens must be at least 0 and below {vocabulary}", param="tokens")
    return {"prompt": serving.text.tokenizer.decode(body.tokens, skip_special_tokens=False)}
