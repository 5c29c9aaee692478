"""Handlers of /tokenize and /detokenize in vLLM's and llama.cpp's formats, and of /tokenizer_info.

Their routes are in tokenization_routes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from pydantic import StrictBool

from kvferry.model_files.tokenizer import TextTokenizer
from kvferry.protocol.errors import InvalidRequest
from kvferry.router.api.bodies.chat_prompt import ChatPrompt
from kvferry.router.api.bodies.fields import Detokenized, Messages, has_part
from kvferry.router.api.bodies.reader import parsed
from kvferry.router.api.bodies.request_body import RequestBody
from kvferry.router.api.served_models import ServedModel, ServedModels
from kvferry.router.media.chat import MediaChat, chat_of
from kvferry.router.media.parts import MODALITIES
from kvferry.router.request_context import RequestContext
from kvferry.router.text.encoding import LONG_CHARS, Bound
from kvferry.router.text.text_model import TextModel


class TokenizeBody(ChatPrompt):
    """Body of POST /tokenize: a prompt, or messages to render first; in llama.cpp's format, `content`.

    With content, special tokens are added if `add_special`, and `with_pieces` shows the text of each token."""

    prompt_field: ClassVar[str] = "messages"
    """Field that holds a prompt with media."""

    prompt: str | None = None
    messages: Messages | None = None
    content: str | None = None
    add_special_tokens: StrictBool | None = None
    add_special: StrictBool | None = False
    parse_special: StrictBool | None = True
    with_pieces: StrictBool | None = False
    return_token_strs: StrictBool | None = False

    def media_chat(self, text: TextModel) -> MediaChat | None:
        """Return the messages if they have images, audio or video, which only an engine can read.

        Raises InvalidRequest."""
        if not has_part(self.messages or (), MODALITIES):
            return None
        return chat_of(text, self.messages or (), tools=self.tools, **self.template_fields(text))

    def named(self, error: InvalidRequest) -> InvalidRequest:
        """Return the error, whose field has the name that the client knows."""
        return error

    def check(self) -> None:
        """Raise InvalidRequest unless exactly one text is given, and for what no tokenizer here can do."""
        if [self.prompt, self.messages, self.content].count(None) != 2:
            raise InvalidRequest("give one of prompt, messages and content", param="prompt")
        if self.parse_special is False:
            raise InvalidRequest(
                "parse_special must be true: special tokens within the text are always tokens", param="parse_special"
            )


class DetokenizeBody(RequestBody):
    """Body of POST /detokenize."""

    tokens: Detokenized


async def tokenize(pools: ServedModels, data: bytes, call: RequestContext) -> dict[str, Any]:
    """Return the token ids of a prompt, or of messages in the chat template; raise InvalidRequest.

    Of messages with media they are those of an engine's prompt, with a placeholder for each row of a medium."""
    body = await parsed(TokenizeBody, data)
    pool = pools.pool(body.model)
    if (chat := body.media_chat(pool.text)) is not None:
        return _tokens(pool, body, (await pool.media_prompt(call, body, chat)).token_ids)
    if body.prompt is not None:
        field, text, marked = "prompt", body.prompt, body.add_special_tokens is not False
    elif body.content is not None:
        field, text, marked = "content", body.content, bool(body.add_special)
    else:
        rendering = await pool.encoder.on_thread(body.rendering, pool.text, body.messages or [], body.tools)
        text = await pool.renderer.render(rendering, call.tenant)
        field, marked = "messages", bool(body.add_special_tokens)
    bound = Bound(pool.max_model_len, field, truncated=True)
    (tokens,) = await pool.encoder.encode([text], bound, add_special_tokens=marked)
    return _tokens(pool, body, tokens)


def _tokens(pool: ServedModel, body: TokenizeBody, tokens: Sequence[int]) -> dict[str, Any]:
    """Return the answer to a body."""
    return {
        "count": len(tokens),
        "max_model_len": pool.max_model_len,
        "tokens": [_piece(pool.text.tokenizer, token) for token in tokens] if body.with_pieces else list(tokens),
        "token_strs": [pool.text.tokenizer.token(token) for token in tokens] if body.return_token_strs else None,
    }


def _piece(tokenizer: TextTokenizer, token: int) -> dict[str, Any]:
    """Return a token's id and text, or its bytes where those are no text."""
    data = tokenizer.token_bytes(token)
    try:
        return {"id": token, "piece": data.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(data)}


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
    text = await pool.encoder.on_thread(decode, body.tokens) if long else decode(body.tokens)
    return {"prompt": text, "content": text}
