"""Rules: collects the Lark rules of an output grammar, and returns expressions for text, tokens and alternatives."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from kvferry.structured_output import lark

SPECIAL = r"<\[\d+\]>"
"""Regular expression of a special token in a spelling."""
_ANY = r"/(.|\n)*/"

Spell = Callable[[str], str]
"""Returns the Lark text of a marker: a token if the vocabulary has it, else text."""


class Rules(lark.RuleLines):
    """Collector of grammar rules; each method returns an expression for its arguments."""

    def __init__(self, spell: Spell) -> None:
        super().__init__()
        self.spell = spell
        self.literal: str | None = None
        """Name of the rule for any value in a derived syntax, once it exists."""

    def any(self) -> str:
        """Return an expression for free text, possibly empty."""
        return self.terminal(_ANY)

    def at_most(self, tokens: int) -> str:
        """Return an expression for free text of at most `tokens` tokens."""
        return self.rule(self.any(), f"[max_tokens={tokens}]")

    def up_to(self, marker: str) -> str:
        """Return an expression for free text up to and including the first such marker."""
        spelled = self.spell(marker)
        if is_token(spelled):
            return f"({self.any()} {spelled})"
        if (found := re.search(rf"(?<= ){SPECIAL}", spelled)) is not None:
            return self._up_to_token(json.loads(spelled[: found.start()]), spelled[found.start() :])
        return self.rule(f"{self.any()} {spelled}", "[lazy]")

    def _up_to_token(self, text: str, rest: str) -> str:
        """Return an expression for free text that ends with this text, before a token."""
        escaped = "\n".join(map(re.escape, text.split("\n")))
        begun = self.terminal(lark.terminal(r"(.|\n)*" + escaped))
        return f"({begun} {rest})"


def either(options: Sequence[str]) -> str:
    """Return a Lark alternative of the options."""
    return f"({' | '.join(options)})"


def has_token(spelled: str) -> bool:
    """Return whether the spelling holds a special token."""
    return re.search(rf"(?:^| ){SPECIAL}", spelled) is not None


def is_token(spelled: str) -> bool:
    """Return whether the spelling names a special token."""
    return spelled.startswith("<")
