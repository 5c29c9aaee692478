"""TranslatedChat: base of chats made from Messages or Responses requests, with errors in those APIs' field names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from kvferry.protocol.errors import InvalidRequest
from kvferry.router.api.bodies.fields import Prompt
from kvferry.router.api.bodies.generating import ChatBody
from kvferry.router.api.bodies.reader import build
from kvferry.router.api.bodies.structured import RequestedGrammar
from kvferry.router.media.chat import MediaChat
from kvferry.router.media.refusal import InvalidMedia
from kvferry.router.text.parsers.output_parser import Parsing
from kvferry.router.text.rendering import Rendering
from kvferry.router.text.text_model import TextModel


class TranslatedChat(ChatBody):
    """Chat translated from a request of another API.

    names         the other API's names of the chat's fields
    bound_field   its field that bounds the output; `prompt_field` holds the prompt
    original      the original request, for the format of the answer
    earlier       bytes of conversation that the request refers to
    """

    original: Any = None
    earlier: int = 0
    names: ClassVar[Mapping[str, str]]
    bound_field: ClassVar[str]

    def check(self) -> None:
        """Raise InvalidRequest in the other API's terms; see ChatBody.check."""
        with self._renaming():
            super().check()

    def prompts(self, text: TextModel) -> Sequence[Prompt | Rendering]:
        """Return the prompt; errors are in the other API's terms."""
        with self._renaming():
            found = super().prompts(text)
        return [replace(each, param=self.prompt_field) if isinstance(each, Rendering) else each for each in found]

    def media_chat(self, text: TextModel) -> MediaChat | None:
        """Return the prompt with media; errors are in the other API's terms."""
        with self._renaming():
            return super().media_chat(text)

    def named(self, error: InvalidRequest) -> InvalidRequest:
        """Return an error in the other API's terms."""
        return renamed(error, self.names)

    def parsing(self, text: TextModel) -> Parsing:
        """Return the parsing of the output; errors are in the other API's terms."""
        with self._renaming():
            return super().parsing(text)

    def grammar(self, text: TextModel, prompt: Sequence[int]) -> RequestedGrammar | None:
        """Return the grammar of the output, under the other API's field name."""
        with self._renaming():
            found = super().grammar(text, prompt)
        return None if found is None else (self.names.get(found[0], found[0]), found[1])

    def output_bound(self) -> tuple[str, int | None]:
        """Return the bound of the output under the other API's field name."""
        return self.bound_field, self.max_completion_tokens

    @classmethod
    @contextmanager
    def _renaming(cls) -> Iterator[None]:
        try:
            yield
        except InvalidRequest as error:
            raise renamed(error, cls.names) from error


Chat = TypeVar("Chat", bound=TranslatedChat)


def translated(kind: type[Chat], fields: Mapping[str, Any], original: Any) -> Chat:
    """Build the chat from these fields without those that are None; raise InvalidRequest in the other API's terms."""
    try:
        chat = build(kind, {name: value for name, value in fields.items() if value is not None})
    except InvalidRequest as error:
        raise renamed(error, kind.names) from error
    chat.original = original
    return chat


def renamed(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """Return the error with the client's name of the field; locations within messages are dropped, unless of media."""
    field, rest = _split(error.param or "")
    own = names.get(field)
    if own is None or error.param is None or isinstance(error, InvalidMedia):
        return error
    param = own if field == "messages" else own + rest.replace(".function", "").replace(".json_schema", "")
    return type(error)(error.message.replace(error.param, param, 1), param=param)


def _split(param: str) -> tuple[str, str]:
    """Split a location: ("tools", "[0].name") for "tools[0].name"."""
    end = min((at for at in (param.find("["), param.find(".")) if at >= 0), default=len(param))
    return param[:end], param[end:]


def string_in(block: Mapping[str, Any], name: str, field: str) -> str:
    """Return the text of a block's field. Raises InvalidRequest if it is not a string. field: path of the block."""
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{field}.{name} must be a string", param=f"{field}.{name}")
    return value
