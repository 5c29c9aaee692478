"""BeamSearch: the beam-search algorithm over next-token log-probabilities, without node calls and text.

Each step extends every live beam by its `2 * width` likeliest tokens. Beams that end are set aside; the `width` best of
the others stay live. A beam's score is its cumulative log-probability divided by its length to the power of the length
penalty. As in vLLM, the length counts the prompt and excludes the ending token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from kvferry.protocol.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Beam:
    """Output tokens of a beam with their log-probabilities; `score` orders beams.

    `parent` is the index of the beam that it extends among the live beams of the previous step."""

    entries: tuple[TokenLogprobs, ...] = ()
    cumulative: float = 0.0
    score: float = 0.0
    parent: int = 0
    ended: bool = False

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return the beam's token ids."""
        return tuple(entry.token_id for entry in self.entries)


class BeamSearch:
    """State of one beam search; it continues while `live` holds beams.

    `ending` are the tokens that end a beam; `prompt_len` and `max_tokens` count tokens."""

    def __init__(
        self, width: int, prompt_len: int, max_tokens: int, ending: Sequence[int], length_penalty: float
    ) -> None:
        self._width, self._prompt_len, self._max_tokens = width, prompt_len, max_tokens
        self._ending, self._penalty = frozenset(ending), length_penalty
        self._ended: list[Beam] = []
        self.live = [Beam()]

    @property
    def candidates(self) -> int:
        """Return how many likeliest next tokens the search needs for each beam."""
        return 2 * self._width

    def advance(self, found: Sequence[TokenLogprobs]) -> None:
        """Extend each live beam by its likeliest next tokens `top`, most likely first."""
        assert len(found) == len(self.live)
        extended: list[Beam] = []
        for parent, (beam, answer) in enumerate(zip(self.live, found, strict=True)):
            for rank, (token, logprob) in enumerate(answer.top[: self.candidates], start=1):
                entry = TokenLogprobs(token, logprob, rank, answer.top)
                (self._ended if token in self._ending else extended).append(self._extended(beam, parent, entry))
        extended.sort(key=attrgetter("score"), reverse=True)
        self.live = extended[: self._width]
        if self.live and len(self.live[0].entries) == self._max_tokens:
            self._ended += self.live
            self.live = []
        self._ended.sort(key=attrgetter("score"), reverse=True)
        del self._ended[self._width :]
        if self._decided():
            self.live = []

    def best(self, count: int) -> list[Beam]:
        """Return the best `count` beams in order; no beam may be live."""
        assert not self.live
        return self._ended[:count]

    def _extended(self, beam: Beam, parent: int, entry: TokenLogprobs) -> Beam:
        entries = (*beam.entries, entry)
        cumulative, ended = beam.cumulative + entry.logprob, entry.token_id in self._ending
        return Beam(entries, cumulative, self._score(cumulative, len(entries) - ended), parent, ended)

    def _score(self, cumulative: float, output_len: int) -> float:
        return cumulative / math.pow(max(1, self._prompt_len + output_len), self._penalty)

    def _decided(self) -> bool:
        """Return whether no live beam can reach the best beams any more.

        A beam's cumulative log-probability only falls, so its score is bounded by the current sum at the current or the
        maximum length."""
        if not self.live or len(self._ended) < self._width:
            return False
        now = len(self.live[0].entries)
        best_possible = max(self._score(self.live[0].cumulative, length) for length in (now, self._max_tokens))
        return self._ended[-1].score >= best_possible
