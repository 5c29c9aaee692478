"""Reading of the fields of a request's body that placement needs; the engine checks all other fields."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.sampling import MAX_COUNT
from kvferry.router.api.bodies.chat_prompt import ChatPrompt
from kvferry.router.api.bodies.fields import CacheSalt, Count, Integer, Messages, Prompt, Prompts, TierFields
from kvferry.router.api.bodies.reader import build, parse
from kvferry.router.api.bodies.request_body import RequestBody
from kvferry.router.api.served_models import ServedModel
from kvferry.router.tenants.scheduler_slots import Size
from kvferry.router.text.encoding import LONG_CHARS, Bound
from kvferry.router.text.rendering import Rendering
from kvferry.router.text.text_model import TextModel

log = logging.getLogger(__name__)

TOKEN_BYTES = 4
"""Bytes assumed for each token of a prompt that cannot be read."""
DEFAULT_OUTPUT = 512
"""Output tokens assumed for a request that names no limit."""


class PickedBody(TierFields, RequestBody):
    """Body of a request whose prompt placement does not read: another API, or not JSON.

    prompt_field  field of the prompts, for errors; empty: none is read
    marked        encoding adds the model's special tokens
    """

    prompt_field: ClassVar[str] = ""
    marked: ClassVar[bool] = False

    n: Annotated[Integer, Field(ge=1, le=MAX_COUNT)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    cache_salt: CacheSalt | None = None

    def texts(self, text: TextModel) -> Sequence[Prompt | Rendering]:
        """Return the prompts: texts, token ids or a rendering; raise InvalidRequest."""
        return []


class PickedChat(PickedBody):
    """Body of POST /v1/chat/completions."""

    model_config = ConfigDict(extra="allow")
    prompt_field = "messages"

    messages: Messages

    def texts(self, text: TextModel) -> Sequence[Prompt | Rendering]:
        """Return the messages and tools as the single prompt."""
        chat = build(ChatPrompt, self.model_extra)
        return [chat.rendering(text, self.messages, chat.tools)]


class PickedCompletion(PickedBody):
    """Body of POST /v1/completions."""

    prompt_field, marked = "prompt", True

    prompt: Prompts

    def texts(self, text: TextModel) -> Sequence[Prompt | Rendering]:
        """Return the prompts as given."""
        return self.prompt


@dataclass(frozen=True, slots=True)
class ParsedPrompts:
    """Inputs of a request to placement.

    body     its fields
    prompts  token ids of each prompt; empty if they cannot be read
    tokens   prompt tokens in total, estimated if the prompts cannot be read
    """

    body: PickedBody
    prompts: tuple[tuple[int, ...], ...]
    tokens: int

    @property
    def size(self) -> Size:
        """Return the size of the request's work."""
        limits = (self.body.max_completion_tokens, self.body.max_tokens, DEFAULT_OUTPUT)
        output = next(limit for limit in limits if limit is not None)
        return Size(max(1, len(self.prompts)) * (self.body.n or 1), self.tokens, max(1, output))


def read_body(path: str, data: bytes) -> PickedBody:
    """Return the fields of a body; raise InvalidRequest naming the first wrong one.

    Bodies of other APIs may be anything."""
    if path.endswith("/chat/completions"):
        return parse(PickedChat, data)
    if path.endswith("/completions"):
        return parse(PickedCompletion, data)
    try:
        named = parse(RequestBody, data)
    except InvalidRequest:
        return PickedBody()
    return PickedBody(model=named.model)


async def read_prompts(body: PickedBody, data: bytes, pool: ServedModel, tenant: str) -> ParsedPrompts:
    """Return the body with its prompts as token ids, rendered and encoded as the router does.

    A prompt that the router's text side cannot render, such as one with images, is placed by its length: the engine may
    read it. Raises InvalidRequest for a prompt that is certainly too long, and for token ids that the model lacks."""
    try:
        found = await _rendered(body, len(data), pool, tenant)
    except InvalidRequest as error:
        log.debug("placed by length: %s", error.message)
        found = []
    texts = [prompt for prompt in found if isinstance(prompt, str)]
    bound = Bound(pool.max_model_len, body.prompt_field)
    encoded = iter(await pool.encoder.encode(texts, bound, add_special_tokens=body.marked))
    prompts = tuple(tuple(next(encoded)) if isinstance(prompt, str) else prompt for prompt in found)
    for prompt in prompts:
        pool.check_ids(prompt, body.prompt_field)
    tokens = sum(map(len, prompts)) or max(1, min(len(data) // TOKEN_BYTES, pool.max_model_len - 1))
    return ParsedPrompts(body, prompts, tokens)


async def _rendered(body: PickedBody, size: int, pool: ServedModel, tenant: str) -> list[Prompt]:
    """Return the prompts as texts or token ids; size: of the body in bytes."""
    rendered = (
        body.texts(pool.text) if size < LONG_CHARS else await pool.encoder.on_thread(body.texts, pool.text, of=size)
    )
    return [await pool.renderer.render(each, tenant) if isinstance(each, Rendering) else each for each in rendered]
