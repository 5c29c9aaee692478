"""Body fields that are rejected by name, because ignoring them would change the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import core_schema


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Marks an unsupported field: it is rejected unless its value is empty or false."""

    what: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(self._refuse, handler(source))

    def __get_pydantic_json_schema__(self, _: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "null", "description": f"{self.what} not supported by this server"}

    def _refuse(self, value: Any) -> Any:
        if value:
            raise ValueError(f"{self.what} not supported by this server")
        return value


def _only_text(value: list[str]) -> list[str]:
    if set(value) - {"text"}:
        raise ValueError("only 'text' is supported by this server")
    return value


TextOnly = Annotated[list[str], AfterValidator(_only_text)]


class UnsupportedFields(BaseModel):
    """Fields that no endpoint supports and that are rejected."""

    logits_processors: Annotated[Any, Unsupported("custom logits processors are")] = None


class UnsupportedForChat(BaseModel):
    """Fields that chat does not support and that are rejected."""

    echo: Annotated[Any, Unsupported("for chat it is")] = False
    chat_template: Annotated[Any, Unsupported("a chat template in the request is")] = None
    modalities: TextOnly | None = None
    audio: Annotated[Any, Unsupported("audio is")] = None
    web_search_options: Annotated[Any, Unsupported("web search is")] = None


class UnsupportedForCompletions(BaseModel):
    """Fields that completions do not support and that are rejected."""

    prompt_embeds: Annotated[Any, Unsupported("prompt embeddings are")] = None
