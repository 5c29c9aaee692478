"""Suspicions that started second attempts, as the routers logged them: how many, and which of them were false."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.chaos.deeds import Done

TOUCHED_S = 15.0
"""For so many seconds after its end a fault may slow its process: a restarted one reads its model."""
_BEGUN = re.compile(r"^([\d.]+) .*?(\S+): a second attempt beside the one on (.+): its node may hang$")
_FALSE = re.compile(r"^([\d.]+) .*?(\S+): the suspected node's token came first$")


@dataclass(frozen=True, slots=True)
class Suspicion:
    """at: monotonic seconds; nodes: that may hang; false: the first token was one of theirs all the same."""

    at: float
    request: str
    nodes: tuple[str, ...]
    false: bool = False

    def excused(self, done: Iterable[Done]) -> bool:
        """Whether a fault had one of the nodes then, or not long before."""
        mine = (each for each in done if each.fault.target in self.nodes)
        return any(each.at <= self.at and (not each.until or self.at <= each.until + TOUCHED_S) for each in mine)


def read_suspicions(log: Path) -> list[Suspicion]:
    """All of the log, in order."""
    found: dict[str, Suspicion] = {}
    with log.open() as lines:
        for line in lines:
            if begun := _BEGUN.match(line.rstrip()):
                at, request, names = begun.groups()
                found[request] = Suspicion(float(at), request, tuple(names.split(", ")))
            elif (false := _FALSE.match(line.rstrip())) and false[2] in found:
                found[false[2]] = replace(found[false[2]], false=True)
    return list(found.values())


def figures(suspicions: Sequence[Suspicion], done: Sequence[Done]) -> dict[str, int]:
    """How many there were, how many were false, and how many were of nodes that no fault had touched."""
    undisturbed = [each for each in suspicions if not each.excused(done)]
    return {
        "begun": len(suspicions),
        "false": sum(each.false for each in suspicions),
        "of_undisturbed_nodes": len(undisturbed),
        "false_of_undisturbed_nodes": sum(each.false for each in undisturbed),
    }
