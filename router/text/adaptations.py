"""Rules that adapt a conversation (merge, rename or split messages) where a chat template would reject or drop parts.

Each rule has a name, which a response header shows, and samples, with which `TemplateTraits` finds out whether a
template needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from kvferry.router.text.message_shaping import joined

Message = Mapping[str, Any]
Messages = list[Message]
_INSTRUCTIONS = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Adaptation:
    """One rule.

    name     as shown in the header of answers
    apply    returns a conversation with the rule applied; an equal one where it does not concern it
    samples  conversations, as roles and texts, that show whether a template needs the rule
    """

    name: str
    apply: Callable[[Messages], Messages]
    samples: tuple[Messages, ...]


def adapted(messages: Sequence[Message], rules: Iterable[Adaptation]) -> tuple[Messages, tuple[str, ...]]:
    """Return the conversation with these rules applied, and the names of those that changed it."""
    shown, names = list(messages), list[str]()
    for rule in rules:
        changed = rule.apply(shown)
        if changed != shown:
            shown = changed
            names.append(rule.name)
    return shown, tuple(names)


def _developers(messages: Messages) -> Messages:
    return [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]


def _head(messages: Messages) -> int:
    """Return how many messages of instructions begin the conversation."""
    return next((place for place, each in enumerate(messages) if each["role"] not in _INSTRUCTIONS), len(messages))


def _one_head(messages: Messages) -> Messages:
    end = _head(messages)
    if end < 2:
        return messages
    return [{**messages[0], "content": joined([each["content"] for each in messages[:end]])}, *messages[end:]]


def _late_as_user(messages: Messages) -> Messages:
    end = _head(messages)
    late = [{**each, "role": "user"} if each["role"] in _INSTRUCTIONS else each for each in messages[end:]]
    return messages[:end] + late


def _head_in_user(messages: Messages) -> Messages:
    end = _head(messages)
    if not end:
        return messages
    text, rest = joined([each["content"] for each in messages[:end]]), messages[end:]
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": joined([text, rest[0]["content"]])}, *rest[1:]]
    return [{"role": "user", "content": text}, *rest]


def _without_empty(messages: Messages) -> Messages:
    """Leave out empty assistant messages, except a last one, which a client may want continued."""
    kept = ("content", "tool_calls", "reasoning_content")
    return [
        each
        for place, each in enumerate(messages)
        if each["role"] != "assistant" or place == len(messages) - 1 or any(map(each.get, kept))
    ]


def _calls_one_by_one(messages: Messages) -> Messages:
    """Put each call in its own message, followed by its results; results of unknown calls follow the last."""
    shown: Messages = []
    place = 0
    while place < len(messages):
        message, place = messages[place], place + 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            shown.append(message)
            continue
        results: dict[Any, Messages] = {}
        while place < len(messages) and messages[place]["role"] == "tool":
            results.setdefault(messages[place].get("tool_call_id"), []).append(messages[place])
            place += 1
        for number, call in enumerate(calls):
            own = {"role": "assistant", "content": ""} if number else message
            shown.append({**own, "tool_calls": [call]})
            shown += results.pop(call.get("id") if isinstance(call, Mapping) else None, ())
        shown += chain.from_iterable(results.values())
    return shown


def _joining(joins: Callable[[Message, Message], bool]) -> Callable[[Messages], Messages]:
    """Return a rule that joins each message to those before it which `joins` it to; the first one's fields stay."""

    def rule(messages: Messages) -> Messages:
        groups: list[Messages] = []
        for message in messages:
            if groups and joins(groups[-1][0], message):
                groups[-1].append(message)
            else:
                groups.append([message])
        return [
            group[0] if len(group) == 1 else {**group[0], "content": joined([each["content"] for each in group])}
            for group in groups
        ]

    return rule


def _is_after_result(first: Message, message: Message) -> bool:
    return bool(first["role"] == "tool" and message["role"] == "user")


def _same(role: str) -> Callable[[Message, Message], bool]:
    def same(first: Message, message: Message) -> bool:
        return bool(
            first["role"] == message["role"] == role and not (first.get("tool_calls") or message.get("tool_calls"))
        )

    return same


def _user_first(messages: Messages) -> Messages:
    end = _head(messages)
    if end == len(messages) or messages[end]["role"] != "assistant":
        return messages
    return [*messages[:end], {"role": "user", "content": ""}, *messages[end:]]


def _chat(*roles: str) -> Messages:
    """Return a sample whose messages have different texts."""
    return [{"role": role, "content": f"kvferry-probe-{place}"} for place, role in enumerate(roles)]


def _called(roles: str, calls: int) -> Messages:
    """Return a sample that begins with a user, an assistant's calls and their results; `roles` follow."""
    ids = [f"probecal{place}" for place in range(calls)]
    made = [{"id": each, "type": "function", "function": {"name": "probe", "arguments": {}}} for each in ids]
    first = [*_chat("user"), {"role": "assistant", "content": "", "tool_calls": made}]
    results = [{"role": "tool", "tool_call_id": each, "content": f"kvferry-probe-{each}"} for each in ids]
    return [*first, *results, *({**each, "content": f"{each['content']}!"} for each in _chat(*roles.split()))]


_EMPTY = [*_chat("user"), {"role": "assistant", "content": ""}, {"role": "user", "content": "kvferry-probe-2"}]

SYSTEM_FIRST = _chat("system", "user")
"""Sample of a conversation that begins with a system message."""
RULES = (
    Adaptation("developer-as-system", _developers, (_chat("developer", "user"),)),
    Adaptation(
        "system-messages-merged", _one_head, (_chat("system", "system", "user"), _chat("system", "developer", "user"))
    ),
    Adaptation(
        "system-as-user",
        _late_as_user,
        (_chat("user", "assistant", "system", "user"), _chat("user", "assistant", "developer", "user")),
    ),
    Adaptation("system-in-user", _head_in_user, (SYSTEM_FIRST,)),
    Adaptation("empty-assistant-dropped", _without_empty, (_EMPTY,)),
    Adaptation("parallel-calls-split", _calls_one_by_one, (_called("", 2),)),
    Adaptation("user-in-result", _joining(_is_after_result), (_called("user", 1),)),
    Adaptation("user-inserted", _user_first, (_chat("assistant", "user"),)),
    Adaptation(
        "assistant-messages-merged", _joining(_same("assistant")), (_chat("user", "assistant", "assistant", "user"),)
    ),
    Adaptation("user-messages-merged", _joining(_same("user")), (_chat("user", "user"),)),
)
"""All rules, in the order in which they are applied."""
