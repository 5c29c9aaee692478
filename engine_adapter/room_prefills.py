"""Attempts of a prefill node that shares an SGLang room with the decode engine: both work on a prompt at once.

States of an attempt: its decode node is asked for a ticket → it gets the room, and this engine the prompt → the decode
engine has the blocks, and both report the first token. If one leg ends early, the other one is aborted, since it would
otherwise wait for minutes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvferry.engine_adapter.engine import EngineCall, EngineDelta, RoomEngine
from kvferry.engine_adapter.handover_sender import HandoverSender, Ticket
from kvferry.engine_adapter.output_sequence import OutputSequence, call_of, length_of
from kvferry.engine_adapter.prefill_attempts import PrefillAttempt, PrefillAttempts
from kvferry.protocol.errors import BlocksCorrupt
from kvferry.protocol.messages import DecodeTarget, Job, ShipDone


class RoomPrefills(PrefillAttempts):
    """Prefills in rooms. host: address of the engine's bootstrap service for decode engines; others: PrefillAttempts.

    Both engines report the first token that the prefill engine drew; if they differ, the room was another prompt's."""

    def __init__(
        self, engine: RoomEngine, sender: HandoverSender, host: str, adapters: Mapping[str, str], **rest: Any
    ) -> None:
        super().__init__(engine, sender, (), adapters, **rest)
        self._rooms, self._host = engine, host

    def _repeats(self, job: Job) -> bool:
        """Return True: the first token is drawn once, and travels with the blocks."""
        return True

    async def _compute(self, attempt: PrefillAttempt) -> None:
        job, target = attempt.job, attempt.target
        length = length_of(job, self._guarantees)
        reference = self._rooms.room(self._host if target is not None else "")
        call = call_of(job, self._new_id(job), self._names.get(job.adapter, ""), length)
        call = replace(call, reference=reference)
        if target is None:
            self._sent(job, call)
            self._first(attempt, OutputSequence(job, length), await self._rooms.prefill_leg(call))
            return
        ticket = await self._sender.offer(job, target)
        self._sent(job, call)
        delta, shipped = await self._run_both(job, target, call, ticket)
        if delta.finish_reason == "length" and not job.work.ends_on_prompt(length - job.prompt_len):
            ends = (
                delta.token_ids[0] in job.params.ending_token_ids and length - job.prompt_len >= job.params.min_tokens
            )
            delta = replace(delta, finish_reason="stop" if ends else None)  # a prefill server ignores stop tokens
        self._first(attempt, OutputSequence(job, length), delta)
        if delta.finish_reason is None:
            attempt.outbox.put_nowait(shipped)

    async def _run_both(
        self, job: Job, target: DecodeTarget, call: EngineCall, ticket: Ticket
    ) -> tuple[EngineDelta, ShipDone]:
        """Run both legs; return the prompt's first token and the account of the transfer."""
        computing = asyncio.create_task(self._rooms.prefill_leg(call))
        fetching = asyncio.create_task(
            self._sender.hand_over_room(job, target, len(call.token_ids), call.reference, ticket)
        )
        legs: tuple[asyncio.Task[Any], ...] = (computing, fetching)
        try:
            await asyncio.wait(legs, return_when=asyncio.FIRST_EXCEPTION)
            for leg in legs:
                if leg.done():
                    leg.result()
        finally:
            for leg in legs:
                leg.cancel()
            await asyncio.gather(*legs, return_exceptions=True)
        delta, (shipped, first_token) = computing.result(), fetching.result()
        if delta.token_ids[0] != first_token:
            raise BlocksCorrupt(f"{target.node_id} reports another first token: the room was another prompt's")
        return delta, shipped
