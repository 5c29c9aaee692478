"""GenerationBody and ChatBody: fields of completion and chat requests, and the prompts and sampling made from them.

Unknown fields are ignored. Each body class defines what differs between the APIs: its prompts, bounds and defaults."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated, ClassVar

from pydantic import Field, StrictBool

from kvferry.model_files.source import ModelFacts
from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.sampling import MAX_COUNT, SamplingParams
from kvferry.router.api.bodies.chat_prompt import ChatPrompt
from kvferry.router.api.bodies.choices import ChoiceFields
from kvferry.router.api.bodies.fields import (
    CacheSalt,
    Count,
    Integer,
    Messages,
    Prompt,
    SamplingFields,
    Stops,
    StreamOptions,
    TierFields,
    Top,
    has_part,
)
from kvferry.router.api.bodies.output_grammar import bounded, parsing
from kvferry.router.api.bodies.reasoning import ReasoningFields
from kvferry.router.api.bodies.request_body import RequestBody
from kvferry.router.api.bodies.session_fields import SessionFields
from kvferry.router.api.bodies.structured import RequestedGrammar, StructuredFields
from kvferry.router.api.bodies.tools import ToolFields, ToolUse
from kvferry.router.api.bodies.unsupported_fields import (
    UnsupportedFields,
    UnsupportedForChat,
)
from kvferry.router.media.chat import MediaChat, chat_of
from kvferry.router.media.parts import MODALITIES
from kvferry.router.text.parsers.output_parser import PLAIN, Parsing
from kvferry.router.text.rendering import Rendering
from kvferry.router.text.text_model import TextModel
from kvferry.router.text.transcript import TextOptions

BadWords = tuple[tuple[int, ...], ...]
"""Token sequences that outputs may not contain."""
_SAMPLING = (
    "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty",
    "presence_penalty",
)  # fmt: skip
_GIVEN = attrgetter(*_SAMPLING)
"""Reader of these fields."""


class GenerationBody(
    SamplingFields, ChoiceFields, StructuredFields, TierFields, SessionFields, UnsupportedFields, RequestBody
):
    """Body fields that chat and completions share; None means the default everywhere.

    prompt_field    the field that holds the prompts, for errors
    output_default  output tokens of a request without a bound; None: the rest of the context
    """

    prompt_field: ClassVar[str]
    output_default: ClassVar[int | None]

    _adaptations: ClassVar[tuple[str, ...]] = ()
    """Default of a value that `prompts` derives: a private attribute of pydantic would cost every request two calls."""

    stream: StrictBool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    stop: Stops = Field(default_factory=list)
    include_stop_str_in_output: StrictBool | None = False
    skip_special_tokens: StrictBool | None = True
    spaces_between_special_tokens: StrictBool | None = True
    truncate_prompt_tokens: Annotated[Integer, Field(ge=1, le=MAX_COUNT)] | None = None
    return_token_ids: StrictBool | None = False
    return_tokens_as_token_ids: StrictBool | None = False
    cache_salt: CacheSalt | None = None
    store: StrictBool | None = None

    def check(self) -> None:
        """Raise InvalidRequest for fields that exclude each other."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
        if self.best_of is not None or self.use_beam_search:
            self.check_choices(self.sequences(), self.prompt_field, streams=bool(self.stream))

    @property
    def adaptations(self) -> tuple[str, ...]:
        """Return the names of the rules that adapted the messages to the chat template, once `prompts` was called."""
        return self._adaptations

    def prompts(self, text: TextModel) -> Sequence[Prompt | Rendering]:
        """Return the prompts: texts, token ids that need no encoding, or a rendering; raise InvalidRequest."""
        raise NotImplementedError

    def media_chat(self, text: TextModel) -> MediaChat | None:
        """Return the prompt if it has images, audio or video; None if `prompts` holds it. Raises InvalidRequest."""
        return None

    def named(self, error: InvalidRequest) -> InvalidRequest:
        """Return the error with the chat's field replaced by its name in the client's API."""
        return error

    def marks_texts(self) -> bool:
        """Return whether encoding adds the model's special tokens to a text."""
        raise NotImplementedError

    def output_bound(self) -> tuple[str, int | None]:
        """Return the field that bounds the output, and its value."""
        return "max_tokens", self.max_tokens

    def top(self) -> int | None:
        """Return how many top log-probabilities each output token shows; None without log-probabilities."""
        raise NotImplementedError

    def sequences(self) -> int:
        """Return how many sequences each prompt generates; the n best of them are shown."""
        return self.best_of or self.n or 1

    def prompt_top(self) -> int | None:
        """Return how many top log-probabilities each prompt token shows; None without log-probabilities."""
        return self.prompt_logprobs

    def sampling(self, facts: ModelFacts, max_tokens: int, bad_words: BadWords, drawn: int) -> SamplingParams:
        """Return the parameters of a prompt's first choice, with the model's defaults; raise InvalidRequest.

        Without a seed it takes the drawn one, so that a retried attempt continues the same text."""
        top, plain = self.top(), zip(_SAMPLING, _GIVEN(self), strict=True)
        given = {name: value for name, value in plain if value is not None}
        params = SamplingParams(
            **{**dict(facts.sampling), **given},
            max_tokens=max_tokens,
            logit_bias=tuple((self.logit_bias or {}).items()),
            seed=self.seed if self.seed is not None else drawn,
            logprobs=top or 0 if self.sequences() > (self.n or 1) else top,
            prompt_logprobs=self.prompt_top(),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            bad_words=bad_words,
            eos_token_ids=facts.eos_token_ids,
            ignore_eos=bool(self.ignore_eos),
        )
        params.validate(facts.vocab_size)
        return params

    def text_options(self) -> TextOptions:
        """Return the display options of the output."""
        return TextOptions(
            stops=tuple(self.stop),
            include_stop=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
            echo_only=self.max_tokens == 0,
        )


class ChatBody(ToolFields, ReasoningFields, ChatPrompt, UnsupportedForChat, GenerationBody):
    """Body of POST /v1/chat/completions."""

    prompt_field, output_default = "messages", None

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: StrictBool | None = False
    top_logprobs: Top | None = None
    add_special_tokens: StrictBool | None = False

    def check(self) -> None:
        """Raise InvalidRequest for an empty output, for top_logprobs without logprobs, and for invalid tools."""
        super().check()
        field, bound = self.output_bound()
        if bound == 0:
            raise InvalidRequest(f"{field} must be at least 1", param=field)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        self._use()

    def parsing(self, text: TextModel) -> Parsing:
        """Return the parsing of the output into reasoning, text and tool calls; raise InvalidRequest."""
        use, shown = self._use(), self.include_reasoning is not False
        plain = use is None and text.thinking is None and not text.channels and not text.is_framed
        if plain:
            return PLAIN
        stops = bool(self.stop or self.stop_token_ids)
        return parsing(text, use, streams=bool(self.stream), stops=stops, shown=shown)

    def grammar(self, text: TextModel, prompt: Sequence[int]) -> RequestedGrammar | None:
        """Return the grammar of the output, including tool calls and reasoning; raise InvalidRequest."""
        requested, use, budget = super().grammar(text, prompt), self._use(), self.reasoning_budget(text)
        if use is None and budget is None and (requested is None or (text.thinking is None and not text.channels)):
            return requested
        return bounded(text, use, requested, prompt, continued=bool(self.continue_final_message), budget=budget)

    def _use(self) -> ToolUse | None:
        has_tools = self.tools or self.functions or self.tool_choice or self.function_call
        return self.tool_use() if has_tools else None

    def prompts(self, text: TextModel) -> Sequence[Prompt | Rendering]:
        """Return the messages and tools as the single prompt."""
        rendering = self.rendering(text, self.messages, None if self._use() is None else self.usable())
        vars(self)["_adaptations"] = rendering.adaptations
        return [rendering]

    def media_chat(self, text: TextModel) -> MediaChat | None:
        """Return the chat if it has images, audio or video, which only an engine can read; raise InvalidRequest."""
        if not has_part(self.messages, MODALITIES):
            return None
        tools = None if self._use() is None else self.usable()
        return chat_of(text, self.messages, tools=tools, **self.template_fields(text))

    def marks_texts(self) -> bool:
        """Return whether to add special tokens; false by default, since templates write them."""
        return bool(self.add_special_tokens)

    def output_bound(self) -> tuple[str, int | None]:
        """Return the bound of the output; max_completion_tokens takes precedence over max_tokens."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().output_bound()

    def top(self) -> int | None:
        """Return the requested number of log-probabilities; None without logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None
