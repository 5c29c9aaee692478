"""Parser for Llama 3 calls: `{"name": ..., "parameters": {...}}`, maybe after `<|python_tag|>`, split by `;` or `,`."""

from __future__ import annotations

from kvferry.router.text.parsers.hermes import ObjectParser

TAG = "<|python_tag|>"
_BETWEEN = ";,"


class Llama3JsonParser(ObjectParser):
    """Parser of Llama 3 tool calls in JSON."""

    opens = (TAG,)
    opens_first = ("{",)

    def _opened(self, marker: str) -> None:
        super()._opened(marker)
        if marker == "{":
            self._marker, self._held = "", marker + self._held

    def _read_call(self) -> bool:
        if self._object is not None:
            return self._read_object()
        rest = self._held.lstrip()
        if rest[:1] and rest[0] in _BETWEEN:
            rest = rest[1:].lstrip()
        if rest.startswith("{"):
            between = self._held[: len(self._held) - len(rest)]
            self._held = rest
            self._begin_object(between)
        elif rest or self._ended:
            self._end_call()
        else:
            return False
        return True
