"""BeamGeneration: beam search for all prompts of a request, one request to a node for each live beam and step.

Each step sends a request of one token for each live beam. It forks from the beam that it extends, shares its blocks,
copies the last partial block and computes one token. A search of w beams and t tokens therefore costs one prompt, about
w * t computed tokens, and as many round trips to a node. Sampling w sequences needs one round trip each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from kvferry.protocol.errors import KvferryError
from kvferry.protocol.messages import TokenLogprobs
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate
from kvferry.router.api.bodies.generating import GenerationBody
from kvferry.router.api.generation import Generation
from kvferry.router.api.sequence_stream import Choice, ChoicePiece
from kvferry.router.api.served_models import ServedModel
from kvferry.router.dispatch.beam_search import Beam, BeamSearch
from kvferry.router.dispatch.interface import Fork, Output, RequestSpec
from kvferry.router.tenants.scheduler_slots import Size
from kvferry.router.text.transcript import Piece

T = TypeVar("T")


class BeamGeneration(Generation):
    """Generation whose choices are the n best beams of each prompt, best first.

    Each choice arrives as one piece when its search ends. Log-probabilities of the prompt come with the first."""

    def __init__(self, pool: ServedModel, prompts: Sequence[RequestSpec], body: GenerationBody) -> None:
        super().__init__(pool, prompts, body.text_options(), n=body.n or 1)
        self._width = body.sequences()
        self._penalty = 1.0 if body.length_penalty is None else body.length_penalty
        self._top = body.top()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def size(self) -> Size:
        """Return the size of the request's work, with one sequence for each beam."""
        return replace(super().size, sequences=len(self.prompts) * self._width)

    async def pieces(self) -> AsyncGenerator[ChoicePiece]:
        """Yield each choice's whole output when its prompt's search ends."""
        try:
            searches = [self._task(self._search(group[0], len(group))) for group in self._groups]
            for group, search in zip(self._groups, searches, strict=True):
                beams, first = await search
                for choice, beam in zip(group, beams, strict=True):
                    yield choice, self._piece(choice, beam, first if choice is group[0] else None)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _search(self, leader: Choice, count: int) -> tuple[list[Beam], Output]:
        """Return the `count` best beams of the leader's prompt, and the output of its first step."""
        spec = leader.spec
        params = spec.params
        search = BeamSearch(self._width, len(spec.token_ids), params.max_tokens, params.ending_token_ids, self._penalty)
        forks: list[Fork | None] = [None]
        first: Output | None = None
        step = 0
        while search.live:
            calls = [
                self._task(self._step(leader, f"{spec.request_id}-b{step}-{i}", beam, forks[i if step else 0]))
                for i, beam in enumerate(search.live)
            ]
            answers = [await answer for answer in calls]
            first = first or answers[0][0]
            search.advance([entry for _, entry, _ in answers])
            forks = [answers[beam.parent][2] for beam in search.live]
            step += 1
        assert first
        return search.best(count), first

    async def _step(
        self, leader: Choice, request_id: str, beam: Beam, fork_of: Fork | None
    ) -> tuple[Output, TokenLogprobs, Fork | None]:
        """Return a step's output, the candidates for the token after the beam, and the fork for its extensions."""
        spec = leader.spec
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=2 * self._width, ignore_eos=True)
        if not beam.entries:
            params = replace(params, prompt_logprobs=spec.params.prompt_logprobs)
        dispatch = self._pool.cluster.start(
            replace(
                spec,
                request_id=request_id,
                token_ids=spec.token_ids + beam.token_ids,
                work=Generate(params),
                fork_of=fork_of,
            )
        )
        if not beam.entries:
            leader.dispatch, leader.ended = dispatch, True
        async for output in dispatch:
            if output.logprobs:
                if not beam.entries:
                    self.count_first(time.monotonic(), dispatch.route)
                return output, output.logprobs[0], dispatch.fork
        raise KvferryError("a step of the beam search ended without a token")

    def _piece(self, choice: Choice, beam: Beam, first: Output | None) -> Piece:
        """Return a beam's whole output as one piece."""
        transcript = choice.transcript = self.transcript(choice.spec)
        shown = None
        if self._top is not None:
            shown = tuple(replace(entry, top=entry.top[: self._top]) for entry in beam.entries)
        output = Output(
            beam.token_ids,
            shown,
            "stop" if beam.ended else "length",
            beam.token_ids[-1] if beam.ended else None,
            first.prompt_logprobs if first else None,
        )
        self.metrics.output_tokens.inc(len(beam.entries))
        choice.ended = True
        return transcript.add(output)

    def _task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that is kept until it ends and cancelled with the pieces."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
