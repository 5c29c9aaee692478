"""Tables of tool-call and reasoning formats, and the choice of a model's format (Dialect) by option or template."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from kvferry.model_files.tokenizer import TextTokenizer
from kvferry.protocol.errors import ConfigError
from kvferry.router.text.parsers import harmony, hermes, mistral
from kvferry.router.text.parsers.call_parser import CallParser
from kvferry.router.text.parsers.derived.derive import Derived
from kvferry.router.text.parsers.derived.grammar import calls
from kvferry.router.text.parsers.derived.reader import SyntaxParser
from kvferry.router.text.parsers.derived.syntax import ToolSyntax
from kvferry.router.text.parsers.derived.verification import is_read
from kvferry.router.text.parsers.family_syntax import WRITERS
from kvferry.router.text.parsers.hermes import HermesParser, LedHermesParser
from kvferry.router.text.parsers.known_syntaxes import HERMES, chosen_syntax
from kvferry.router.text.parsers.llama3_json import Llama3JsonParser
from kvferry.router.text.parsers.mistral import MistralParser
from kvferry.router.text.parsers.pythonic import INSTRUCTION, PythonicParser
from kvferry.router.text.parsers.reasoning import Thinking
from kvferry.router.text.parsers.syntax import Writer
from kvferry.router.text.transcript import TextOptions

CALLS: Mapping[str, type[CallParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
}
MARKERS_OF = {"hermes": hermes.BEGIN, "mistral": mistral.BEGIN}
"""Texts that open calls anywhere, by family."""
_THINK = (("<think>",), ("</think>",))
REASONING: Mapping[str, Thinking] = {
    "deepseek_r1": Thinking(*_THINK, always=True),
    "qwen3": Thinking(*_THINK),
    "granite": Thinking(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
    "mistral": Thinking(("[THINK]",), ("[/THINK]",)),
    "openai_gptoss": Thinking(("<|channel|>analysis<|message|>",), ("<|end|>",)),
}
DERIVED = "derived"
"""Family whose syntax the template revealed (`derived`)."""
OPENAI = "openai"
"""Family whose whole outputs are messages on channels (`harmony`)."""
AUTO, NONE = "auto", "none"
MARKERS = frozenset(
    (
        "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_start|>",
        "<|python_end|>", "<think>", "</think>", "[THINK]", "[/THINK]",
    )
)  # fmt: skip
"""Markers that parsers must see even if they are special tokens, which are otherwise not shown."""


def marker_ids(tokenizer: TextTokenizer, markers: Iterable[str] = MARKERS) -> dict[str, int]:
    """Return the markers that are tokens of the vocabulary."""
    ids = {marker: tokenizer.library.token_to_id(marker) for marker in markers}
    return {marker: token_id for marker, token_id in ids.items() if token_id is not None}


@cache
def tokens_in(tokenizer: TextTokenizer, marks: tuple[str, ...]) -> dict[str, int]:
    """Return the added tokens that occur within these texts of a syntax."""
    added = tokenizer.library.get_added_tokens_decoder()
    texts = {each.content: index for index, each in added.items() if each.content.strip()}
    return {text: index for text, index in texts.items() if any(text in mark for mark in marks)}


def shown(tokenizer: TextTokenizer, options: TextOptions, marks: tuple[str, ...], *, channels: bool) -> dict[int, str]:
    """Return the special tokens to show because the parsers must see them; marks: texts that may contain them."""
    if channels:
        return harmony.marks(tokenizer)
    if not options.skip_special_tokens:
        return {}
    found, special = {**marker_ids(tokenizer), **tokens_in(tokenizer, marks)}, tokenizer.special_ids
    return {token_id: marker for marker, token_id in found.items() if token_id in special}


@dataclass(frozen=True, slots=True)
class Dialect:
    """Tool-call dialect of a model.

    family  DERIVED, or the family of a parser that is written by hand
    own     its template shows tools, calls and results; otherwise `tool_prompt` shows those that are missing
    syntax  syntax that its template revealed, if the family is DERIVED"""

    family: str
    own: bool
    syntax: ToolSyntax | None = None

    @property
    def is_led(self) -> bool:
        """Return whether the prompt asks for a mark before an answer without calls."""
        return not self.own and self.syntax is None

    @property
    def parser(self) -> Callable[..., CallParser] | None:
        """Return the constructor of parsers; None if the parser of channels also reads calls."""
        if self.family == OPENAI:
            return None
        if self.syntax is not None:
            return partial(SyntaxParser, self.syntax)
        return LedHermesParser if self.is_led else CALLS[self.family]

    @property
    def marker(self) -> str:
        """Return the text behind which the grammar of calls bounds the output; empty if no text always does."""
        if self.syntax is not None:
            return self.syntax.marker if self.syntax.is_marked else ""
        return MARKERS_OF.get(self.family, "")

    @property
    def written(self) -> ToolSyntax | None:
        """Return the syntax of calls that a template drops from earlier answers; None if it is not known."""
        return HERMES if self.family == "hermes" else self.syntax

    @property
    def writer(self) -> Writer:
        """Return the function that builds the grammar of calls."""
        return WRITERS[self.family] if self.syntax is None else partial(calls, self.syntax)

    @property
    def marks(self) -> tuple[str, ...]:
        """Return further texts in which the parser must see special tokens."""
        return () if self.syntax is None else self.syntax.literals()


_CHANNELS = "<|channel|>analysis"


@cache
def dialect(name: str, template: str, derived: Derived, *, knows_tools: bool) -> Dialect | None:
    """Return the dialect of the model with this chat template; None if it calls no tools.

    name: value of --tool-call-parser. derived: what the template's own calls revealed."""
    if name == NONE:
        return None
    if name != AUTO:
        return Dialect(name if knows_tools else "hermes", own=knows_tools)
    family = _detected(template)
    if family == OPENAI:
        return Dialect(OPENAI, own=True) if knows_tools else None
    if derived.calls is not None and derived.calls.is_marked:
        return Dialect(DERIVED, own=knows_tools, syntax=derived.calls)
    if knows_tools and family is not None and (INSTRUCTION.search(template) or _reads(family, derived)):
        return Dialect(family, own=True)
    syntax = chosen_syntax(derived.calls, template)
    if knows_tools and syntax is not None:
        return Dialect(DERIVED, own=True, syntax=syntax)
    return Dialect("hermes", own=False)


def _reads(family: str, derived: Derived) -> bool:
    """Return whether a family's parser reads the calls that a template writes, if it writes any."""
    return not derived.shows_calls or is_read(CALLS[family], dict(derived.texts), derived.calls)


@cache
def thinking(name: str, template: str | None, derived: Thinking | None = None) -> Thinking | None:
    """Return the reasoning marks; name: value of --reasoning-parser. derived: marks that the template revealed."""
    if name == NONE:
        return None
    if name != AUTO:
        return REASONING[name]
    if derived is not None and not (template is not None and _CHANNELS in template):
        return derived
    for family, marks in (
        ("openai_gptoss", _CHANNELS),
        ("mistral", "[THINK]"),
        ("qwen3", "</think>"),
        ("granite", "my thought process:"),
    ):
        if template is not None and marks in template:
            return REASONING[family]
    return None


@cache
def has_channels(calls: Dialect | None, thoughts: Thinking | None) -> bool:
    """Return whether a model's whole outputs are messages on channels."""
    return thoughts is REASONING["openai_gptoss"] or (calls is not None and calls.family == OPENAI)


@cache
def marks_of(calls: Dialect | None, thoughts: Thinking | None) -> tuple[str, ...]:
    """Return the texts of a model's calls and reasoning, in which parsers must see special tokens."""
    thought_marks = () if thoughts is None else (*thoughts.begins, *thoughts.ends)
    return (*thought_marks, *(() if calls is None else calls.marks))


def check_names(tool_call_parser: str, reasoning_parser: str, *, knows_tools: bool) -> None:
    """Raise ConfigError for an unknown name, or for one that does not fit the template."""
    for field, name, table in (
        ("tool_call_parser", tool_call_parser, (*CALLS, OPENAI)),
        ("reasoning_parser", reasoning_parser, REASONING),
    ):
        known: Any = (AUTO, NONE, *table)
        if name not in known:
            raise ConfigError(f"{field} must be one of {', '.join(known)}; got {name!r}", param=field)
    if tool_call_parser not in (AUTO, NONE, "hermes") and not knows_tools:
        raise ConfigError(
            f"the chat template does not support tools, so the model writes no calls for {tool_call_parser!r}; "
            "use auto, which describes the tools in the prompt, or give another template with --chat-template",
            param="tool_call_parser",
        )


def _detected(template: str) -> str | None:
    """Return the family whose calls the template writes; None for an unknown one."""
    if _CHANNELS in template:
        return OPENAI
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<function=" in template:
        return None
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_start|>" in template or INSTRUCTION.search(template):
        return "pythonic"
    if "<|python_tag|>" in template or '"parameters": ' in template:
        return "llama3_json"
    return None


def check_channels(text: TextTokenizer, calls: Dialect | None, thoughts: Thinking | None) -> None:
    """Raise ConfigError if channels cannot be distinguished from text, or if only one parser reads them."""
    if not has_channels(calls, thoughts):
        return
    if (calls is not None and calls.family != OPENAI) or thoughts not in (None, REASONING["openai_gptoss"]):
        raise ConfigError(
            "the parsers openai and openai_gptoss work only with each other or with none: both read messages on "
            "channels",
            param="tool_call_parser",
        )
    missing = [marker for marker in harmony.MARKERS if text.library.token_to_id(marker) is None]
    if missing:
        raise ConfigError(
            f"the vocabulary has no token {missing[0]}, which marks channels; "
            "use --tool-call-parser none --reasoning-parser none to show them as text",
            param="tool_call_parser",
        )
