"""ChatTemplate: a model's chat templates, what they support, and their rendering in this process or a child."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property

from jinja2 import TemplateError, nodes
from jinja2.environment import Template as Compiled
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvferry.model_files.template_language import environment
from kvferry.protocol.errors import ConfigError, InvalidRequest, reason
from kvferry.router.text.cheap_costs import Costly
from kvferry.router.text.cheap_templates import cheap_environment, is_cheap
from kvferry.router.text.function_variables import takes_functions
from kvferry.router.text.parsers.derived.derive import Derived, Template, derive
from kvferry.router.text.render_child import RenderChild
from kvferry.router.text.render_frames import (
    DEADLINE_S,
    TEXT,
    pack,
)
from kvferry.router.text.rendering import Rendering
from kvferry.router.text.template_traits import XML_TOOLS, Probe, probed

SMALL_BYTES = 8 * 1024
"""Largest size of the variables for a rendering in this process, in bytes."""
MAX_SOURCE = 2**20
"""Longest source of a template, in characters."""
MAX_PROBING_S = 60.0
"""Longest time for the probes of a template, in seconds, beyond the start of their process."""


class ChatTemplate:
    """A model's templates, rendered by `Renderer`; raises ConfigError if they do not compile.

    sources         first request to a child process
    roles           roles that the templates compare a message's role with
    special_tokens  bos_token, eos_token, ...: variables of the templates
    source          text of the tool template if there is one, else of the plain one
    variables       names of variables that the templates read, some of which they set themselves
    knows_tools     the template shows tools
    knows_calls     it shows calls and their results, whether or not it shows tools
    traits          what the templates expect of messages
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
        self._child: RenderChild | None = None
        self._compiled = {name: compiled[text] for name, text in texts.items()} if compiled else {}
        names = [name for tree in trees.values() for name in tree.find_all(nodes.Name)]
        self.variables = frozenset(name.name for name in names if name.ctx == "load")
        self.knows_tools = bool(self.variables & {"tools", XML_TOOLS}) or takes_functions(self.variables)
        self.roles = frozenset[str]().union(*map(_roles, trees.values()))
        self.knows_calls = self.knows_tools or ("tool_calls" in self.source and "tool" in self.roles)
        self.cheap = self.cheap and self._renders_here()
        with RenderChild(self.sources, MAX_PROBING_S) as self._child:
            self.traits = probed(self._shown, self.variables, knows_calls=self.knows_calls)
        self._child = None
        self.knows_tools = self.knows_tools and not self.traits.hides_tools

    @property
    def wants_parts(self) -> bool:
        """Return whether a message's content must be a list of parts, not a string."""
        return self.traits.wants_parts

    @property
    def takes_system(self) -> bool:
        """Return whether the template shows a system message."""
        return self.traits.takes_system

    def render(self, rendering: Rendering) -> str:
        """Return a prompt's text, rendered here or in a child process; blocks. Raises InvalidRequest."""
        text = self.render_here(rendering)
        if text is not None:
            return rendering.finished(text)
        with RenderChild(self.sources, DEADLINE_S) as child:
            found = child.answer(rendering.frame)
        if found is None:
            raise rendering.died()
        return rendering.outcome(*found)

    def render_here(self, rendering: Rendering) -> str | None:
        """Return what the template writes; None if rendering it in this process could take long.

        Raises InvalidRequest if the template refuses the variables."""
        if not self.cheap or len(rendering.frame) > SMALL_BYTES:
            return None
        try:
            return self._compiled[rendering.name].render(rendering.variables)
        except (Costly, RecursionError):
            return None
        except Exception as error:  # a template is a program and can fail in any way on unexpected messages
            raise rendering.refused(str(error)) from error

    def render_all(self, renderings: Sequence[Rendering]) -> list[str | None]:
        """Return the texts of several prompts, with one child process at most; None where that failed. Blocks.

        Raises ConfigError if the templates do not compile."""
        texts: list[str | None] = [None] * len(renderings)
        left: list[int] = []
        for place, rendering in enumerate(renderings):
            with contextlib.suppress(InvalidRequest):
                texts[place] = self.render_here(rendering)
                left += [place] if texts[place] is None else []
        if not left:
            return texts
        with contextlib.ExitStack() as ends:
            child = self._child or ends.enter_context(RenderChild(self.sources, MAX_PROBING_S))
            for place in left:
                found = child.answer(renderings[place].frame)
                texts[place] = found[1] if found is not None and found[0] == TEXT else None
        return texts

    @cached_property
    def derived(self) -> Derived:
        """Return the syntax of calls and reasoning that the templates reveal, derived at the first use; blocks."""
        if not self.knows_calls and "reasoning" not in self.source and "thinking" not in self.source:
            return Derived()
        return derive(Template(self.render_all, self.special_tokens, self.traits, self.knows_calls))

    def _renders_here(self) -> bool:
        with contextlib.suppress(InvalidRequest):
            probe = Probe(with_tools=False, variables={"messages": [{"role": "user", "content": "Hi"}]})
            return self.render_here(self._rendering(probe)) is not None
        return True

    def _rendering(self, probe: Probe) -> Rendering:
        return Rendering("tool_use" if probe.with_tools else "plain", {**self.special_tokens, **probe.variables})

    def _shown(self, probes: Sequence[Probe]) -> list[str | None]:
        return self.render_all(list(map(self._rendering, probes)))


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
