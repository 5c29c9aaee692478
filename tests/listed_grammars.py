"""The seam's second implementation: a grammar is a list of outputs, spelled in token ids."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence

import numpy as np

from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.work import Grammar
from kvferry.structured_output.interface import Bits


def listed(*outputs: Sequence[int]) -> Grammar:
    """Exactly one of these."""
    return Grammar("listed", json.dumps([list(output) for output in outputs]))


class ListedMatcher:
    def __init__(self, outputs: list[list[int]], eos: int, compiler: ListedCompiler) -> None:
        self._outputs, self._eos, self._compiler = outputs, eos, compiler
        self._tokens: list[int] = []

    closes_at = 0

    def mask(self, bits: Bits) -> None:
        self._compiler.masks += 1
        hold = self._compiler.held
        if hold is not None:
            assert hold.wait(20)
        words = np.frombuffer(memoryview(bits).cast("B"), np.uint32)
        words[:] = 0
        for output in self._going_on(self._tokens):
            token = output[len(self._tokens)] if len(output) > len(self._tokens) else self._eos
            words[token // 32] |= 1 << token % 32

    def accept(self, token_ids: Sequence[int]) -> int:
        for count, token in enumerate(token_ids):
            if not any(True for output in self._going_on([*self._tokens, token])):
                return count
            self._tokens.append(token)
        return len(token_ids)

    def rollback(self, count: int) -> None:
        del self._tokens[len(self._tokens) - count :]

    def closing(self, room: int) -> int | None:
        """Towards the shortest output, where the compiler is told to."""
        output = min(self._going_on(self._tokens), key=len)
        left = output[len(self._tokens) :]
        return left[0] if self._compiler.closes and left and len(left) + 1 >= room else None

    def _going_on(self, tokens: list[int]) -> list[list[int]]:
        return [output for output in self._outputs if output[: len(tokens)] == tokens]


class ListedCompiler:
    """Counts what it is asked. held: masks wait for this event. closes: outputs that would be cut are
    closed."""

    def __init__(self, eos: int) -> None:
        self.compiled = self.masks = 0
        self.held: threading.Event | None = None
        self.closes = False
        self._eos = eos

    def compile(self, grammar: Grammar) -> ListedMatcher:
        self.compiled += 1
        if grammar.kind != "listed":
            raise InvalidRequest(f"this compiler reads lists, got {grammar.kind!r}")
        return ListedMatcher(json.loads(grammar.source), self._eos, self)
