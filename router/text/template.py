"""A model's chat templates: what their source says, and their rendering in this process or in a child."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.environment import Template as Compiled
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvferry.protocol.errors import ConfigError, InvalidRequest, reason
from kvferry.router.text.cheap_costs import Costly
from kvferry.router.text.cheap_templates import cheap_environment, is_cheap
from kvferry.router.text.parsers.derived.derive import Derived, Template, derive
from kvferry.router.text.render_frames import (
    COMMAND,
    DEADLINE_S,
    MEMORY_SPENT,
    READY,
    TEXT,
    answers_in,
    framed,
    minimal_environment,
    pack,
)
from kvferry.router.text.rendering import WITHIN, Rendering
from kvferry.router.text.template_language import environment

SMALL = 8 * 1024
"""Largest size of the variables for a rendering in this process, in bytes."""
MAX_SOURCE = 2**20
"""Longest source of a template, in characters."""
START_S = 30.0
"""Time for the start of a child process, in seconds."""
_PROBE = "kvferry-probe"
_PARTS = [{"type": "text", "text": _PROBE}]


class ChatTemplate:
    """A model's templates, rendered by `Renderer`; raises ConfigError if they do not compile.

    sources         first request to a child process
    roles           roles that the templates compare a message's role with
    special_tokens  bos_token, eos_token, ...: variables of the templates
    wants_parts     a message's content must be a list of parts, not a string
    source          text of the tool template if there is one, else of the plain one
    knows_tools     the template shows tools
    takes_system    the template shows a system message
    cheap           small prompts are rendered in this process
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, tool_use: str | None = None) -> None:
        texts = {"plain": source, "tool_use": source if tool_use is None else tool_use}
        self.source = texts["tool_use"]
        self.special_tokens = dict(special_tokens)
        self.sources = pack(texts)
        try:
            trees = _parsed(list(texts.values()))
            self.cheap = all(is_cheap(tree, text) for text, tree in trees.items())
            compiled = _compiled(trees) if self.cheap else {}
        except (TemplateError, SyntaxError, RecursionError, ValueError) as error:  # jinja compiles to Python
            raise ConfigError(f"the chat template does not parse: {reason(error)}", param="chat_template") from error
        self._compiled = {name: compiled[text] for name, text in texts.items()} if compiled else {}
        self.knows_tools = any(name.name == "tools" for tree in trees.values() for name in tree.find_all(nodes.Name))
        self.roles = frozenset[str]().union(*map(_roles, trees.values()))
        self.cheap = self.cheap and self._renders_here()
        shows = self._shows if self.cheap else self._shown_in_child()
        self.wants_parts = not shows("user", _PROBE) and shows("user", _PARTS)
        self.takes_system = shows("system", _PARTS if self.wants_parts else _PROBE)

    def render(self, rendering: Rendering) -> str:
        """Return a prompt's text, rendered here or in a child process; blocks. Raises InvalidRequest."""
        text = self.render_here(rendering)
        if text is not None:
            return rendering.finished(text)
        answers = self._in_child([rendering])
        if len(answers) < 2:
            raise rendering.died()
        return rendering.outcome(*answers[1])

    def render_here(self, rendering: Rendering) -> str | None:
        """Return what the template writes; None if rendering it in this process could take long.

        Raises InvalidRequest if the template refuses the variables."""
        if not self.cheap or len(rendering.frame) > SMALL:
            return None
        try:
            return self._compiled[rendering.name].render(rendering.variables)
        except (Costly, RecursionError):
            return None
        except Exception as error:  # a template is a program and can fail in any way on unexpected messages
            raise rendering.refused(str(error)) from error

    def render_all(self, asked: Sequence[Rendering]) -> list[str | None]:
        """Return the texts of several prompts within the time of one, in one child process; None where there is none.

        Blocks."""
        texts: dict[int, str] = {}
        later: list[int] = []
        for place, each in enumerate(asked):
            with contextlib.suppress(InvalidRequest):
                text = self.render_here(each)
                if text is None:
                    later.append(place)
                else:
                    texts[place] = text
        if later:
            answers = self._in_child([asked[place] for place in later], DEADLINE_S)[1:]
            texts |= {place: text for place, (kind, text) in zip(later, answers, strict=False) if kind == TEXT}
        return [texts.get(place) for place in range(len(asked))]

    @cached_property
    def derived(self) -> Derived:
        """Return the syntax of calls and reasoning that the templates reveal, derived at the first use; blocks."""
        if not self.knows_tools and "reasoning" not in self.source and "thinking" not in self.source:
            return Derived()
        return derive(Template(self.render_all, self.special_tokens, self.wants_parts, self.knows_tools))

    def _probe(self, role: str, content: Any) -> Rendering:
        messages = [{"role": role, "content": content}]
        if role != "user":
            messages.append({"role": "user", "content": [] if isinstance(content, list) else ""})
        return Rendering("plain", {**self.special_tokens, "messages": messages, "add_generation_prompt": True})

    def _renders_here(self) -> bool:
        with contextlib.suppress(InvalidRequest):
            return self.render_here(self._probe("user", _PROBE)) is not None
        return True

    def _shows(self, role: str, content: Any) -> bool:
        """Return whether the template shows a message of this role and content."""
        with contextlib.suppress(InvalidRequest):
            return _shown(self.render(self._probe(role, content)))
        return False

    def _shown_in_child(self) -> Callable[[str, Any], bool]:
        """Return `_shows` of one child process; raise ConfigError if the templates do not compile there."""
        cases = [(role, content) for role in ("user", "system") for content in (_PROBE, _PARTS)]
        answers = self._in_child([self._probe(*case) for case in cases])
        if not answers or answers[0][0] == MEMORY_SPENT:
            raise ConfigError(f"the chat template cannot be compiled {WITHIN}", param="chat_template")
        kind, text = answers[0]
        if kind != READY:
            raise ConfigError(f"the chat template does not parse: {text}", param="chat_template")
        answered = zip(cases, answers[1:], strict=False)
        shown = [case for case, (kind, text) in answered if kind == TEXT and _shown(text)]
        return lambda role, content: (role, content) in shown

    def _in_child(self, asked: list[Rendering], deadline_s: float | None = None) -> list[tuple[bytes, str]]:
        """Return the answers of a child process to the sources and to these; fewer if it ended before.

        deadline_s: time for all renderings."""
        requests = b"".join(map(framed, [self.sources, *(each.frame for each in asked)]))
        patience = START_S + (DEADLINE_S * len(asked) if deadline_s is None else deadline_s)
        try:
            done = subprocess.run(
                COMMAND,
                input=requests,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=patience,
                env=minimal_environment(),
                check=False,
            )
            answered = done.stdout
        except subprocess.TimeoutExpired as error:
            answered = error.stdout or b""
        return list(answers_in(answered))


def _shown(text: str) -> bool:
    return _PROBE in text and "'type'" not in text


def _parsed(texts: Collection[str]) -> dict[str, nodes.Template]:
    """Return the syntax of each text, once where two are equal; raise ValueError for one that is too long."""
    longest = max(map(len, texts))
    if longest > MAX_SOURCE:
        raise ValueError(f"it has {longest} characters; the limit is {MAX_SOURCE}")
    language = environment(ImmutableSandboxedEnvironment)
    return {text: language.parse(text) for text in dict.fromkeys(texts)}


def _compiled(texts: Iterable[str]) -> dict[str, Compiled]:
    sandbox = cheap_environment()
    return {text: sandbox.from_string(text) for text in texts}


def _roles(tree: nodes.Template) -> frozenset[str]:
    """Return the texts that a template compares with a role."""
    found: set[str] = set()
    for comparison in tree.find_all(nodes.Compare):
        sides = [comparison.expr, *(operand.expr for operand in comparison.ops)]
        if any(map(_is_role, sides)):
            found |= {text for side in sides if not _is_role(side) for text in _texts(side)}
    return frozenset(found)


def _is_role(expression: nodes.Expr) -> bool:
    match expression:
        case nodes.Name(name="role") | nodes.Getattr(attr="role") | nodes.Getitem(arg=nodes.Const(value="role")):
            return True
    return False


def _texts(expression: nodes.Expr) -> list[str]:
    constants = [expression] if isinstance(expression, nodes.Const) else expression.find_all(nodes.Const)
    return [constant.value for constant in constants if isinstance(constant.value, str)]
