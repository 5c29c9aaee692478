"""Generation: runs all sequences of one HTTP request on nodes, counts their usage, and cancels what still runs.

`SequenceStream` turns each Output of a dispatch into a Piece. A transcript turns its tokens into text, an
OutputParser separates tool calls and reasoning, and the endpoint's Answer formats the result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from kvferry.protocol.media import MODALITIES
from kvferry.protocol.model_metrics import ModelMetrics
from kvferry.protocol.prefix_reuse import Reuse
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate
from kvferry.router.api.admission import TokenUsage
from kvferry.router.api.choice_streams import ChoiceMerge
from kvferry.router.api.sequence_stream import Choice, Listener, OutputJournal, Pieces, SequenceStream, TextWriter
from kvferry.router.api.served_models import ServedModel
from kvferry.router.dispatch.interface import Dispatch, RequestSpec, Route
from kvferry.router.tenants.scheduler_slots import Size
from kvferry.router.tenants.tenant_queue import Slot
from kvferry.router.text.parsers.families import shown
from kvferry.router.text.parsers.output_parser import PLAIN, OutputParser, Parsing
from kvferry.router.text.transcript import TextOptions, Transcript

_SEEDS = 2**64


class Journal(OutputJournal, Protocol):
    """Journal of a request, which may have begun elsewhere."""

    def start(self, spec: RequestSpec, choice: int, compute: Callable[[RequestSpec], Dispatch]) -> Dispatch:
        """Return the dispatch of a choice; `compute` starts one that computes tokens."""
        ...


class Generation:
    """Generation of n choices for each prompt, with seeds seed + i.

    `prompts` are the specs of the first choice of each prompt. `turn` is the scheduler slot, set before `pieces`;
    without one, all choices may run at once. The first choices start first. A prompt's other choices start at its first
    token as forks: they share its blocks and compute only its last token. The caller must call `close` after closing
    the pieces; it cancels what still runs."""

    def __init__(
        self,
        pool: ServedModel,
        prompts: Sequence[RequestSpec],
        options: TextOptions,
        parsing: Parsing = PLAIN,
        *,
        n: int = 1,
    ) -> None:
        self._pool = pool
        self.metrics = pool.metrics
        self._options = options
        if parsing is not PLAIN:
            tokens = shown(pool.text.tokenizer, options, parsing.marks, channels=parsing.channels)
            self._options = replace(options, shown=tokens)
        self._parsing = parsing
        self.turn: Slot | None = None
        self._journal: Journal | None = None
        self._pieces: SequenceStream | ChoiceMerge | None = None
        self._started = False
        self.prompts = tuple(prompts)
        self._prompt_tokens = sum([len(spec.token_ids) for spec in prompts])
        self.choices = [
            Choice(number * n + i, number, spec)
            for number, first in enumerate(prompts)
            for i, spec in enumerate(_specs(first, n))
        ]
        self._groups = [self.choices[at : at + n] for at in range(0, len(self.choices), n)]

    def record(self, journal: Journal, singly: Callable[[int], int]) -> None:
        """Record all outputs, and begin with those that the journal has; call it before `pieces`.

        singly: given a choice's index, the number of its first tokens that make a piece each."""
        self._journal = journal
        for choice in self.choices:
            choice.journal, choice.singly = journal, singly(choice.index)

    def pieces(self) -> Pieces:
        """Iterate over the choices' pieces as they arrive; raise the error of the first dispatch that fails."""
        if self.turn is not None and self.turn.newcomer:
            for leader, *_ in self._groups:
                leader.spec = replace(leader.spec, newcomer=True)
        if len(self.choices) > 1:
            self._pieces = ChoiceMerge(
                self._groups, self._follow, self.turn.at_once if self.turn else len(self.choices)
            )
        else:
            self._pieces = self._follow(self.choices[0])
        return self._pieces

    def listen(self, listener: Listener | None, write: TextWriter | None = None) -> None:
        """Send pieces directly to `listener` while the iteration waits, without waking a task; not for beams.

        `write`: see SequenceStream.listen. Call it after `pieces`."""
        if self._pieces is not None:
            self._pieces.listen(listener, write)

    async def close(self) -> None:
        """Cancel every dispatch that still runs."""
        self._pieces = None
        if left := [choice for choice in self.choices if not choice.ended]:
            await asyncio.gather(*map(self.cancel, left), return_exceptions=True)

    @property
    def route(self) -> Route | None:
        """Return the route of the first choice, known from its first piece on."""
        dispatch = self.choices[0].dispatch
        return dispatch.route if dispatch is not None else None

    @property
    def size(self) -> Size:
        """Return the size of the request's work."""
        works = [spec.work for spec in self.prompts]
        longest = max([work.params.max_tokens for work in works if isinstance(work, Generate)])
        return Size(len(self.choices), self._prompt_tokens, longest)

    def used(self) -> TokenUsage:
        """Return the tokens used so far; each prompt counts once."""
        output, cached, written, itl_s = 0, 0, 0, 0.0
        for choice in self.choices:
            if choice.transcript is not None:
                output += choice.transcript.completion_tokens
            if choice.timed_tokens:
                itl_s = max(itl_s, choice.timed_s / choice.timed_tokens)
        for group in self._groups:
            dispatch = group[0].dispatch
            if dispatch is not None and dispatch.route is not None:
                reuse = dispatch.route.reuse
                cached += reuse.cached_len
                written += reuse.written
        return TokenUsage(self._prompt_tokens, cached, output, itl_s, written)

    def _media_tokens(self) -> dict[str, int]:
        """Return the prompts' tokens that stand for images, audio and video, by their names in the usage."""
        media = [spec.media for spec in self.prompts if spec.media is not None]
        counts = {f"{each}_tokens": sum(m.tokens(each) for m in media) for each in MODALITIES if media}
        return {name: count for name, count in counts.items() if count}

    def usage(self) -> dict[str, Any]:
        """Return the API's usage object so far."""
        used = self.used()
        usage: dict[str, Any] = {
            "prompt_tokens": used.prompt,
            "completion_tokens": used.output,
            "total_tokens": used.prompt + used.output,
            "prompt_tokens_details": {"cached_tokens": used.cached, **self._media_tokens()},
        }
        if self._parsing.thinking is not None:
            thought = sum(choice.transcript.reasoning_tokens or 0 for choice in self.choices if choice.transcript)
            usage["completion_tokens_details"] = {"reasoning_tokens": thought}
        return usage

    def _follow(self, choice: Choice) -> SequenceStream:
        if choice.dispatch is None and self._journal is not None:
            choice.dispatch = self._journal.start(choice.spec, choice.index, self._pool.cluster.start)
        elif choice.dispatch is None:
            choice.dispatch = self._pool.cluster.start(choice.spec)
        return SequenceStream(choice, aiter(choice.dispatch), self)

    def transcript(self, spec: RequestSpec) -> Transcript | OutputParser:
        """Return a new transcript of a sequence, with parsers if needed."""
        assert isinstance(spec.work, Generate)
        tokenizer = self._pool.text.tokenizer
        transcript = Transcript(tokenizer, spec.token_ids, spec.work.params, self._options)
        if self._parsing is PLAIN:
            return transcript
        name = f"{spec.request_id} {spec.call.identity.nonce}"
        return OutputParser(transcript, self._parsing, self._parsing.reader(tokenizer, spec.token_ids), name)

    async def cancel(self, choice: Choice, *, complete: bool = False) -> None:
        """Cancel a choice's dispatch if it still runs."""
        if choice.dispatch is not None and not choice.ended:
            choice.ended = True
            await choice.dispatch.cancel(complete=complete)

    def count_first(self, now: float, route: Route | None) -> None:
        """Count a prompt, and observe the time to first token at the first call."""
        if not self._started:
            self._started = True
            self.metrics.ttft.observe(now - self.prompts[0].call.arrival)
        if route is not None and not route.late:
            count_prompt(self.metrics, route)

    def count_late(self, choice: Choice) -> None:
        """Count a prompt whose token sources were reported only with the last token."""
        if choice.dispatch is not None and (route := choice.dispatch.route) is not None:
            count_prompt(self.metrics, route)


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of choice number `choice`, wrapped to 64 signed bits; choice 0 keeps the seed."""
    half = _SEEDS // 2
    return (seed + choice + half) % _SEEDS - half


def _specs(first: RequestSpec, n: int) -> list[RequestSpec]:
    """Return the specs of a prompt's choices; only the first asks for log-probabilities of the prompt."""
    assert isinstance(first.work, Generate)
    works = [replace(first.work, params=_later(first.work.params, i)) for i in range(1, n)]
    return [first] + [
        replace(first, request_id=f"{first.request_id}-{i}", work=work) for i, work in enumerate(works, start=1)
    ]


def _later(params: SamplingParams, choice: int) -> SamplingParams:
    return replace(params, seed=choice_seed(params.seed, choice), prompt_logprobs=None)


def count_prompt(metrics: ModelMetrics, route: Route) -> None:
    """Count the origin of a prompt's tokens."""
    for source, tokens in _sources(route.reuse).items():
        if tokens:
            metrics.prompt_tokens[source].inc(tokens)


def _sources(reuse: Reuse) -> dict[str, int]:
    return {
        "computed": reuse.computed,
        "reused_prefill": reuse.reused_prefill,
        "reused_decode": reuse.reused_decode,
        "fetched": reuse.fetched,
    }
