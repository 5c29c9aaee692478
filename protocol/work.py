"""Kinds of work in a job (Generate, Embed, Classify), and the grammar that constrains an output."""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass

from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.wire import message

message(1, checked=True)(SamplingParams)


@message(4, checked=True)
@dataclass(frozen=True, slots=True)
class Grammar:
    """Constraint on the output as data: `kind` says how to read `source`.

    "json_schema"     source is a JSON schema, as JSON text ("{}" is any JSON value)
    "json_object"     any JSON object; source is empty
    "regex"           a regular expression (Rust's `regex` syntax) that matches the whole output
    "choice"          a JSON list of texts; the whole output is one of them
    "lark"            a grammar in llguidance's Lark notation; its rule `start` is the whole output. It mixes literal
                      text, special tokens by id `<[17]>` and JSON schemas `%json {...}`, which structured_output
                      writes. End-of-sequence tokens are not named: the output may end where the grammar is complete
    "ebnf"            a grammar in GBNF / EBNF notation; its rule `root` is the whole output
    "structural_tag"  JSON text: free text in which certain words open a part with a grammar of its own
                      (structured_output/structural.py)

    lenient         of JSON schemas: ignore keywords that cannot be enforced, instead of rejecting them
    whitespace      of JSON: a regular expression for whitespace between tokens; None: as Python's json.dumps writes it;
                    empty: no whitespace"""

    kind: str
    source: str
    lenient: bool = False
    whitespace: str | None = None


@message(5, checked=True)
@dataclass(frozen=True, slots=True)
class Generate:
    """Work that generates output tokens, with sampling parameters and an optional grammar."""

    params: SamplingParams
    grammar: Grammar | None = None

    @property
    def whole_prompt(self) -> bool:
        """Return whether hidden states of the whole prompt are needed, so that none may come from a cache."""
        return self.params.prompt_logprobs is not None

    def ends_on_prompt(self, delivered: int = 0) -> bool:
        """Return whether the work is done once the prompt's last position is computed.

        delivered: output tokens delivered before. No decode node is needed then."""
        return self.params.max_tokens - delivered <= 1


POOLINGS = ("last", "cls", "mean")
"""Poolings that Embed supports."""


@message(6, checked=True)
@dataclass(frozen=True, slots=True)
class Embed:
    """Work that returns a vector of the prompt, from hidden states after the final norm.

    pooling     "last": of the last token; "cls": of the first; "mean": over all
    normalize   scale to length 1
    dimensions  number of dimensions to keep, before normalising; 0: all"""

    pooling: str = "last"
    normalize: bool = True
    dimensions: int = 0

    @property
    def whole_prompt(self) -> bool:
        """Return whether hidden states of the whole prompt are needed.

        A cached prefix has none, and pooling by the last token needs only that token's, which is always computed."""
        return self.pooling != "last"

    def ends_on_prompt(self, delivered: int = 0) -> bool:
        """Return True: there are no output tokens."""
        return True

    def validate(self) -> None:
        """Raise InvalidRequest for values that no node supports."""
        if self.pooling not in POOLINGS:
            raise InvalidRequest(f"pooling must be one of {', '.join(POOLINGS)}, got {self.pooling!r}", param="pooling")
        if self.dimensions < 0:
            raise InvalidRequest(f"dimensions must be at least 0, got {self.dimensions}", param="dimensions")


@message(7, checked=True)
@dataclass(frozen=True, slots=True)
class Classify:
    """Work that returns logits of a sequence classification head for the prompt, one per label.

    second_from: start of a pair's second text, for families that mark it; 0: no pair or no mark."""

    second_from: int = 0

    @property
    def whole_prompt(self) -> bool:
        """Return True: the whole prompt is computed."""
        return True

    def ends_on_prompt(self, delivered: int = 0) -> bool:
        """Return True: there are no output tokens."""
        return True

    def validate(self) -> None:
        """Raise InvalidRequest for values that no node supports."""
        if self.second_from < 0:
            raise InvalidRequest(f"second_from must be at least 0, got {self.second_from}", param="second_from")


Work = Generate | Embed | Classify
"""Kinds of work. Embed and Classify are answered by one TokenDelta without tokens, with `vector` as the result."""


def floats(vector: bytes) -> array[float]:
    """Decode a vector: float32, little-endian."""
    found = array("f")
    found.frombytes(vector)
    if sys.byteorder == "big":
        found.byteswap()
    return found
