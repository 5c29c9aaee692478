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

    json_schema  source is a JSON schema, as JSON text ("{}" is any JSON value)
    json_object  any JSON object; source is empty
    regex        a regular expression
    choice       a JSON list of texts, one of which is the whole output
    lark         a grammar in Lark's notation, as the grammar library reads it
    ebnf         a grammar in GBNF / EBNF notation
    """

    kind: str
    source: str


@message(5)
@dataclass(frozen=True, slots=True)
class Generate:
    """Output tokens: how they are drawn, and the grammar that bounds them."""

    params: SamplingParams
    grammar: Grammar | None = None


Work = Generate
