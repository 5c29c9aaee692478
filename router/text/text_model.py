"""TextModel: tokenizer, chat template and configuration of one model; turns messages into prompts and token ids."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.model_files.model_name import ModelName
from kvferry.model_files.pooling_config import GENERATES, PoolingConfig
from kvferry.model_files.source import ModelFacts
from kvferry.model_files.tokenizer import TextTokenizer
from kvferry.protocol.errors import InvalidRequest
from kvferry.router.text.adaptations import Adaptation, adapted
from kvferry.router.text.harmony_history import channelled, described
from kvferry.router.text.message_shaping import Message, has_tools, object_arguments, shaped
from kvferry.router.text.parsers.derived.syntax import UNFRAMED
from kvferry.router.text.parsers.derived.writing import calls_in_content
from kvferry.router.text.parsers.families import AUTO, Dialect, dialect, has_channels, thinking
from kvferry.router.text.parsers.reasoning import Thinking
from kvferry.router.text.rendering import Rendering
from kvferry.router.text.template import ChatTemplate
from kvferry.router.text.thinking_variables import EFFORT, variables
from kvferry.router.text.tool_prompt import tools_as_text, with_tool_prompt

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles of the OpenAI API; models trained on other roles name them in their chat template."""
_RESERVED = frozenset(("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"))


@dataclass(frozen=True, slots=True)
class TextModel:
    """Text side of one model; safe to use from several threads, and encoding releases the GIL.

    called            names of the model for clients
    template          None if the model has none and none was given
    tool_call_parser  format of tool calls: auto, none, or a family
    reasoning_parser  format of reasoning: auto, none, or a family
    strict_templates  messages that the template refuses are not adapted to it
    """

    called: ModelName
    tokenizer: TextTokenizer
    template: ChatTemplate | None
    facts: ModelFacts
    task: PoolingConfig = GENERATES
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    strict_templates: bool = False

    @property
    def dialect(self) -> Dialect | None:
        """Return the model's tool-call dialect; None if it has none."""
        template = self.template
        if template is None:
            return None
        return dialect(self.tool_call_parser, template.source, template.derived, knows_tools=template.knows_tools)

    @property
    def thinking(self) -> Thinking | None:
        """Return the model's reasoning marks; None if it has none, or if they are shown as text."""
        template = self.template
        if template is None:
            return thinking(self.reasoning_parser, None)
        return thinking(self.reasoning_parser, template.source, template.derived.thinking)

    @property
    def is_framed(self) -> bool:
        """Return whether there are marks around the text of its outputs."""
        dialect = self.dialect
        return dialect is not None and dialect.syntax is not None and dialect.syntax.frame != UNFRAMED

    @property
    def channels(self) -> bool:
        """Return whether all its outputs are messages on channels."""
        return has_channels(self.dialect, self.thinking)

    @property
    def name(self) -> str:
        """Return the model's first name."""
        return self.called.first

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return token ids; special tokens written in the text are always recognised."""
        return self.encode_all([text], add_special_tokens=add_special_tokens)[0]

    def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each text."""
        encode = self.tokenizer.library.encode_batch_fast  # the plain `encode` keeps the GIL
        return [found.ids for found in encode(list(texts), add_special_tokens=add_special_tokens)]

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Return the token ids of two texts with special tokens, and the index of the second text."""
        found = self.tokenizer.library.encode_batch_fast([(first, second)], add_special_tokens=True)[0]
        ids, places = found.ids, found.sequence_ids
        return ids, places.index(1) if 1 in places else len(ids)

    def render(self, messages: Sequence[Message], **given: Any) -> str:
        """Render messages to the prompt's text; blocks, possibly for a child process. given: see `rendering`.

        Raises InvalidRequest naming the field."""
        rendering = self.rendering(messages, **given)
        assert self.template is not None
        return self.template.render(rendering)

    def rendering(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> Rendering:
        """Return what the template is to render for these messages; raise InvalidRequest naming the field.

        `extra` are further variables (chat_template_kwargs). With continue_final_message the prompt ends with the last
        message's content."""
        template = self.template
        if template is None:
            raise InvalidRequest(
                f"the model {self.name!r} has no chat template; give the router one with --chat-template, or use "
                "/v1/completions",
                param="messages",
            )
        extra = extra or {}
        self.check(messages, extra)
        traits = template.traits
        shown, tools, mark = self._conversation(template, messages, tools)
        adapted_messages, adaptations = adapted(shown, () if mark or self.strict_templates else self._rules(template))
        thinking = variables(extra, template.variables, () if self.strict_templates else traits.efforts)
        if EFFORT in extra and thinking[EFFORT] != extra[EFFORT]:
            adaptations = (*adaptations, "reasoning-effort-nearest")
        return Rendering(
            "tool_use" if tools else "plain",
            {
                **template.special_tokens,
                **thinking,
                "messages": traits.content(adapted_messages),
                **traits.tools(tools),
                "documents": documents or None,
                "add_generation_prompt": add_generation_prompt,
            },
            mark,
            adapted_messages[-1]["content"] if continue_final_message else None,
            adaptations=adaptations,
        )

    def _conversation(
        self, template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Any] | None
    ) -> tuple[Sequence[Message], Sequence[Any] | None, str]:
        """Return messages and tools in the template's form, and the mark of instructions in mid-conversation."""
        shown = [shaped(message, place) for place, message in enumerate(messages)]
        syntax, takes_system = (self.dialect.syntax if self.dialect else None), template.takes_system
        if not self.shows_tools and syntax is not None:
            shown = with_tool_prompt(shown, tools, syntax, takes_system=takes_system) if tools else shown
        elif (tools or any(map(has_tools, shown))) and not self.shows_tools:
            parsed = list(map(object_arguments, shown))
            return tools_as_text(parsed, tools, takes_system=takes_system), None, ""
        if self.channels:
            mark = uuid.uuid4().hex
            return channelled(list(map(object_arguments, shown)), mark), described(tools), mark
        return template.traits.calls(shown, keeps_functions="function" in template.roles), tools, ""

    def _rules(self, template: ChatTemplate) -> Sequence[Adaptation]:
        """Return the template's rules, after one for calls that it drops."""
        dialect, rules = self.dialect, template.traits.rules
        syntax = dialect.written if dialect is not None and template.traits.drops_calls else None
        return rules if syntax is None else (calls_in_content(syntax), *rules)

    @property
    def shows_tools(self) -> bool:
        """Return whether the template shows tools in a supported format."""
        dialect, template = self.dialect, self.template
        return template is not None and (template.knows_tools if dialect is None else dialect.own)

    def check(self, messages: Sequence[Message], extra: Mapping[str, Any]) -> None:
        """Raise InvalidRequest for a role that neither the API nor the template knows, most likely a client's typo.

        Also for chat_template_kwargs (`extra`) that would replace fields of the request."""
        if taken := sorted(_RESERVED & extra.keys()):
            raise InvalidRequest(f"chat_template_kwargs must not set {taken[0]}", param="chat_template_kwargs")
        named = self.template.roles if self.template else frozenset[str]()
        for place, message in enumerate(messages):
            role = message.get("role")
            if role not in ROLES and role not in named:
                allowed = ", ".join((*ROLES, *sorted(named.difference(ROLES))))
                raise InvalidRequest(
                    f"messages[{place}].role must be one of {allowed}; got {role!r}", param=f"messages[{place}].role"
                )
