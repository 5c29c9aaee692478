"""Probe conversations that reveal how a chat template writes calls and reasoning, with values that are easy to find."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

USER, CONTENT, REASON = "Kvasked", "Kvsaid", "Kvthought"
NAMES = ("kvf_alpha", "kvf_beta")
IDS = ("Kv1d5Xq2Z", "Kv1d6Yr3W")
"""Nine letters and digits, as Mistral's templates demand."""
NAMED_IDS = tuple(f"functions.{name}:{place}" for place, name in enumerate(NAMES))
"""Ids that name the tool, as Kimi's templates write them in place of a name."""
OPENAI_ID = "call_Kv1d5Xq2Z7mN4pQ8rS6tU3v"
KEYS, COUNTS = ("kvk_one", "kvk_two"), ("kvn_one", "kvn_two")
TEXTS, NUMBERS = ("Kvtext1", "Kvtext2"), (7107, 7208)
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message in which templates look for reasoning."""
ROUGH = "\nSão <b>\"X\"</b> & 'y'\n\t{1: [2]}, z=3"
"""A string with all characters that have a meaning in some syntax."""
TYPED: Mapping[str, Any] = {
    "kvt_zeta": "5", "kvt_int": 7, "kvt_num": 1.5, "kvt_yes": True, "kvt_no": False, "kvt_nul": None,
    "kvt_list": [1, "two", True, [], {"a": None}], "kvt_obj": {"a": {"b": "c", "d": [2]}, "e": False}, "kvt_emp": {},
    "kvt_alpha": "",
}  # fmt: skip
PLAIN: Mapping[str, Any] = {
    "kvt_zeta": "x", "kvt_int": 7, "kvt_yes": True, "kvt_list": ["two", 3], "kvt_obj": {"a": {"b": "c"}, "e": 1},
}  # fmt: skip
"""Typed values without null and empty ones, which some templates drop."""
_KINDS: Mapping[type, str] = {
    str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", list: "array", dict: "object",
}  # fmt: skip
PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        **{key: {"type": "string"} for key in KEYS},
        **{key: {"type": "integer"} for key in COUNTS},
        **{key: {"type": _KINDS[type(value)]} for key, value in TYPED.items()},
    },
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Kvtool.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string", "description": "Kvkey."} for key in KEYS},
                "required": list(KEYS),
            },
        },
    }
    for name in NAMES
]
"""Tools that the templates show; they are simple, since some templates fail on complex ones."""


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """An answer that a template is to write: calls of NAMES with these arguments, content and reasoning."""

    calls: Sequence[Mapping[str, Any]] = ()
    content: str = ""
    reasoning: str = ""

    def messages(self, *, as_text: bool = False, key: str = REASONING_KEYS[0], ids: Sequence[str] = IDS) -> list[Any]:
        """Return the conversation; `as_text`: arguments are JSON text; `key`: field of the reasoning."""
        answer: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            answer[key] = self.reasoning
        if self.calls:
            answer["tool_calls"] = [
                {
                    "id": ids[place % len(ids)],
                    "type": "function",
                    "function": {
                        "name": NAMES[place % len(NAMES)],
                        "arguments": json.dumps(each, ensure_ascii=False) if as_text else dict(each),
                    },
                }
                for place, each in enumerate(self.calls)
            ]
        return [{"role": "user", "content": USER}, answer]


_ONE, _TWO = {KEYS[0]: TEXTS[0]}, {KEYS[0]: TEXTS[0], KEYS[1]: TEXTS[1]}
CALLS: Mapping[str, ProbeAnswer] = {
    "plain": ProbeAnswer(content=CONTENT),
    "none": ProbeAnswer([{}]),
    "one": ProbeAnswer([_ONE]),
    "two": ProbeAnswer([_TWO]),
    "count": ProbeAnswer([{COUNTS[0]: NUMBERS[0]}]),
    "counts": ProbeAnswer([dict(zip(COUNTS, NUMBERS, strict=True))]),
    "rough": ProbeAnswer([{KEYS[0]: ROUGH}]),
    "slash": ProbeAnswer([{KEYS[0]: "a\\n'b"}]),
    "typed": ProbeAnswer([TYPED]),
    "tidy": ProbeAnswer([PLAIN]),
    "said": ProbeAnswer([_ONE], content=CONTENT),
    "thought": ProbeAnswer([_ONE], reasoning=REASON),
    "both": ProbeAnswer([_ONE], content=CONTENT, reasoning=REASON),
    "several": ProbeAnswer([_ONE, {KEYS[1]: TEXTS[1]}]),
    "several_counts": ProbeAnswer([{COUNTS[0]: NUMBERS[0]}, {COUNTS[1]: NUMBERS[1]}]),
    "several_rough": ProbeAnswer([{}, {KEYS[0]: ROUGH, COUNTS[0]: 3}, {KEYS[0]: "x", COUNTS[0]: 1}]),
}
"""Answers whose texts are compared."""
REASONING: Mapping[str, ProbeAnswer] = {
    "said": ProbeAnswer(content=CONTENT),
    "thought": ProbeAnswer(content=CONTENT, reasoning=REASON),
    "called": ProbeAnswer([_ONE], reasoning=REASON),
}
