"""Kinds of work in a job: generate, embed or classify, with sampling and grammar."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.wire import message

message(1, checked=True)(SamplingParams)


@message(4, checked=True)
@dataclass(frozen=True, slots=True)
class Grammar:
    """Constraint on the output as data: `kind` says how to read `source`.

    json_schema     source is a JSON schema, as JSON text ("{}" is any JSON value)
    json_object     any JSON object; source is empty
    regex           a regular expression (Rust's `regex` syntax), matched by the whole output
    choice          a JSON list of texts, one of which is the whole output
    lark            a grammar in Lark's notation as llguidance reads it; its rule `start` is the whole output. It mixes
                    literal text, special tokens by id `<[17]>` and JSON schemas `%json {...}`:
                    structured_output/lark.py writes these pieces. End-of-sequence tokens are not named: the output may
                    end where the grammar is complete
    ebnf            a grammar in GBNF / EBNF notation; its rule `root` is the whole output
    structural_tag  JSON text: free text in which certain words open a part with a grammar of its own
                    (structured_output/structural.py)

    lenient         of JSON schemas: keywords that cannot be enforced are ignored; otherwise they are refused
    whitespace      of JSON: a regular expression for the blanks between tokens, None for those of Python's json.dumps,
                    empty for none
    """

    kind: str
    source: str
    lenient: bool = False
    whitespace: str | None = None


@message(5, checked=True)
@dataclass(frozen=True, slots=True)
class Generate:
    """Output tokens: how they are drawn, and the grammar that bounds them."""

    params: SamplingParams
    grammar: Grammar | None = None

    @property
    def whole_prompt(self) -> bool:
        """Return whether the prompt's hidden states are all wanted, so that none of it may come from a cache."""
        return self.params.prompt_logprobs is not None

    def ends_on_prompt(self, delivered: int = 0) -> bool:
        """Return whether nothing is left to do once the prompt and `delivered` output tokens are computed but what
        comes of their last position: no decode node is needed."""
        return self.params.max_tokens - delivered <= 1


POOLINGS = ("last", "cls", "mean")


@message(6, checked=True)
@dataclass(frozen=True, slots=True)
class Embed:
    """A vector of the prompt, from its hidden states after the final norm.

    pooling     last: of its last token; cls: of its first; mean: over all
    normalize   to length 1
    dimensions  how many numbers of it to keep, before it is normalised; 0: all
    """

    pooling: str = "last"
    normalize: bool = True
    dimensions: int = 0

    @property
    def whole_prompt(self) -> bool:
        """A prefix from the cache brings no hidden states: only the last token's are computed in any case."""
        return self.pooling != "last"

    def ends_on_prompt(self, delivered: int = 0) -> bool:
        return True

    def validate(self) -> None:
        """Raise InvalidRequest for what no node can do."""
        if self.pooling not in POOLINGS:
            raise InvalidRequest(f"pooling must be one of {', '.join(POOLINGS)}, got {self.pooling!r}", param="pooling")
        if self.dimensions < 0:
            raise InvalidRequest(f"dimensions must be at least 0, got {self.dimensions}", param="dimensions")


@message(7, checked=True)
@dataclass(frozen=True, slots=True)
class Classify:
    """Logits of a sequence classification head for the prompt, one per label.

    second_from: where the second text of a pair begins, for families that mark it; 0: no pair, or no mark."""

    second_from: int = 0

    @property
    def whole_prompt(self) -> bool:
        return True

    def ends_on_prompt(self, delivered: int = 0) -> bool:
        return True

    def validate(self) -> None:
        """Raise InvalidRequest for what no node can do."""
        if self.second_from < 0:
            raise InvalidRequest(f"second_from must be at least 0, got {self.second_from}", param="second_from")


Work = Generate | Embed | Classify
"""Embed and Classify are answered by one TokenDelta without tokens, whose `vector` is the result."""
