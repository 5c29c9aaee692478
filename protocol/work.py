"""What a job asks of a model: to generate text, or to say something of its prompt."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.sampling import SamplingParams
from protocol.wire import message

message(1)(SamplingParams)


@message(4)
@dataclass(frozen=True, slots=True)
class Grammar:
    """What the output must match, as data: `kind` says how `source` is read.

    json_schema     source is a JSON schema, as JSON text ("{}" is any JSON value)
    json_object     any JSON object; source is empty
    regex           a regular expression (Rust's `regex` syntax), matched by the whole output
    choice          a JSON list of texts, one of which is the whole output
    lark            a grammar in Lark's notation as llguidance reads it; its rule `start` is the whole output. It mixes
                    literal text, special tokens by id `<[17]>` and JSON schemas `%json {...}`: grammars/lark.py writes
                    these pieces. End-of-sequence tokens are not named: the output may end where the grammar is complete
    ebnf            a grammar in GBNF / EBNF notation; its rule `root` is the whole output
    structural_tag  JSON text: free text in which certain words open a part with a grammar of its own
                    (grammars/structural.py)

    lenient         of JSON schemas: keywords that cannot be enforced are ignored; otherwise they are refused
    whitespace      of JSON: a regular expression for the blanks between tokens, None for the default (bounded), empty
                    for none
    """

    kind: str
    source: str
    lenient: bool = False
    whitespace: str | None = None


@message(5)
@dataclass(frozen=True, slots=True)
class Generate:
    """Output tokens: how they are drawn, and the grammar that bounds them."""

    params: SamplingParams
    grammar: Grammar | None = None


Work = Generate
