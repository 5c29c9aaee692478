"""Rewrites ids of tool calls into the form that a chat template demands, and matches results to calls.

An id may come from any server. It is mapped by a function of the id, or of the call's place, so that a conversation is
rendered alike in every turn."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

Message = dict[str, Any]


class IdForm(Enum):
    """Form of the ids that a template demands.

    ANY       as the client sends them
    NINE      nine letters and digits, as Mistral's templates check
    INDEXED   `functions.NAME:INDEX`, as in Kimi's templates; the index counts the conversation's calls
    """

    ANY = re.compile(r".+", re.DOTALL)
    NINE = re.compile(r"[A-Za-z0-9]{9}")
    INDEXED = re.compile(r"functions\..+:\d+")


def identified(
    messages: Sequence[Mapping[str, Any]], form: IdForm, *, names_results: bool, keeps_functions: bool
) -> list[Message]:
    """Return the messages with an id for each call, in this form, and each result with its call's id.

    names_results    results also get their call's name
    keeps_functions  results of the role `function` keep it, because the template knows it
    """
    calls, shown = _Calls(form), []
    for message in messages:
        if message.get("tool_calls"):
            shown.append({**message, "tool_calls": [calls.added(call) for call in message["tool_calls"]]})
        elif message.get("role") in ("tool", "function"):
            role = "function" if keeps_functions and message["role"] == "function" else "tool"
            shown.append({**calls.answered(message, names=names_results), "role": role})
        else:
            shown.append(dict(message))
    return shown


@dataclass(frozen=True, slots=True)
class _Call:
    place: int
    name: str
    id: str


class _Calls:
    """Calls of a conversation so far."""

    def __init__(self, form: IdForm) -> None:
        self._form = form
        self._count = 0
        self._by_id: dict[str, _Call] = {}
        """Latest calls by their clients' ids; some clients use an id again in each turn."""
        self._open: dict[int, _Call] = {}
        self._open_by_name: dict[str, dict[int, _Call]] = {}

    def added(self, call: Any) -> Any:
        """Return a call with its id."""
        if not isinstance(call, Mapping):
            return call
        given, name = call.get("id"), _name(call)
        own = _Call(self._count, name, self._mapped(given if isinstance(given, str) else "", name))
        self._open[own.place] = self._open_by_name.setdefault(name, {})[own.place] = own
        if isinstance(given, str):
            self._by_id[given] = own
        self._count += 1
        return {**call, "id": own.id}

    def answered(self, result: Mapping[str, Any], *, names: bool) -> Message:
        """Return a result with its call's id: that of the given id, else the first open one of its name, else any."""
        given, name = result.get("tool_call_id"), str(result.get("name", ""))
        if not (isinstance(given, str) and given):
            call = next(iter((self._open_by_name.get(name) or self._open).values()), None)
            if call is None:
                return dict(result)
        elif (call := self._by_id.get(given)) is None:
            return {**result, "tool_call_id": self._mapped(given, name)}
        self._open.pop(call.place, None)
        self._open_by_name[call.name].pop(call.place, None)
        found = {**result, "tool_call_id": call.id}
        return {**found, "name": call.name} if names and not name else found

    def _mapped(self, given: str, name: str) -> str:
        if self._form.value.fullmatch(given):
            return given
        if self._form is IdForm.INDEXED:
            return f"functions.{name}:{self._count}"
        own = given or f"call_{self._count}"
        return hashlib.sha256(own.encode()).hexdigest()[:9] if self._form is IdForm.NINE else own


def _name(call: Mapping[str, Any]) -> str:
    function = call.get("function")
    return str(function.get("name", "")) if isinstance(function, Mapping) else ""
