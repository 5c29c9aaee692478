"""ModelMedia: asks a model's nodes to render chats with media into prompts, and to transcribe audio."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from kvferry.placement.rejections import no_nodes
from kvferry.protocol.errors import InvalidRequest, KvferryError, NodeDown, NodeLost, StepFailed
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.media import TRANSCRIPTION, RenderedPrompt, RenderRequest, followed_by, joined, with_files
from kvferry.protocol.speech import SpeechPart, SpeechRequest
from kvferry.protocol.wire import WireError, pack
from kvferry.router.dispatch.prompt_media import PromptMedia, RenderedMedia
from kvferry.router.nodes.client import NodeClient
from kvferry.router.nodes.model_nodes import ModelNodes, holds, takes
from kvferry.router.nodes.node_entry import NodeEntry, node_key
from kvferry.router.nodes.node_table import NodeTable
from kvferry.router.nodes.watched_call import watched

log = logging.getLogger(__name__)

MAX_SILENCE_S, CHECK_S = 10.0, 0.1
"""Longest wait for the only node to be heard again, and time between two checks, in seconds."""

T = TypeVar("T")


class ModelMedia:
    """Calls of one model's nodes. Implements `interface.MediaServices`."""

    def __init__(self, model: ModelNodes, nodes: NodeTable, client: NodeClient) -> None:
        self._model, self._nodes, self._client = model, nodes, client

    def check(self, abilities: Collection[str], adapter: str = "") -> None:
        """Raise InvalidRequest if no node has these abilities, and NoNodes if none is known at present."""
        leases = [lease for lease in self._model.leases() if holds(lease, adapter)]
        if not leases:
            raise no_nodes(self._model.name.first)
        if not any(takes(lease, abilities) for lease in leases):
            missing = [each for each in abilities if not any(takes(lease, (each,)) for lease in leases)] or abilities
            does = "transcribes audio" if TRANSCRIPTION in missing else f"takes {' and '.join(missing)} in a prompt"
            raise InvalidRequest(f"no node of the model {does}")

    def modalities(self, adapter: str = "") -> frozenset[str]:
        """Return the abilities that some node with the adapter has."""
        return frozenset(each for lease in self._model.leases() if holds(lease, adapter) for each in lease.modalities)

    async def render(self, request: RenderRequest, modalities: Collection[str]) -> RenderedMedia:
        """Return a chat's prompt from the least busy node that takes its media, or from a second one if that fails."""

        async def call_node(node: NodeLease, is_last: bool, left_s: float) -> RenderedMedia:
            found: list[Any] = []
            if (entry := self._nodes.entries.get(node_key(node))) is None:
                raise NodeLost(f"{node.node_id} is lost")
            body = followed_by(pack(replace(request, deadline_s=left_s, files=())), request.files)
            call = self._client.call(node, "POST /attempts/render", body, left_s, None, found.append)
            await watched(entry, call, left_s, ignore_suspicion=is_last)
            return RenderedMedia(*_prompt(found, node, request.files))

        return await self._first(modalities, request.adapter, call_node, request.deadline_s)

    async def transcribe(self, request: SpeechRequest, deliver: Callable[[SpeechPart], None]) -> None:
        """Deliver the answer of the least busy node that transcribes, or of a second one if that fails before it."""
        begun = False

        def answer(message: Any) -> None:
            nonlocal begun
            if not isinstance(message, SpeechPart) or begun == bool(message.content_type):
                raise WireError(f"a {type(message).__name__} that is invalid as an answer to a SpeechRequest")
            begun = True
            deliver(message)

        async def call_node(node: NodeLease, is_last: bool, left_s: float) -> None:
            body = pack(replace(request, deadline_s=left_s))
            await self._client.call(node, "POST /attempts/transcribe", body, left_s, None, answer)

        await self._first((TRANSCRIPTION,), "", call_node, request.deadline_s, lambda: not begun)

    async def _first(
        self,
        abilities: Collection[str],
        adapter: str,
        call: Callable[[NodeLease, bool, float], Awaitable[T]],
        deadline_s: float,
        may_repeat: Callable[[], bool] = lambda: True,
    ) -> T:
        """Return the answer of a node, or of one other if that fails. Raises NoNodes, or the last node's error.

        call: calls a node, given whether it is the last one to try, and the seconds that are left.

        At most two nodes are called, since media that crash engines must not crash all of them. The only node is called
        again once its silent process is heard again. No node is blamed for a call that lasts until the deadline."""
        nodes = [entry.lease for entry in self._usable(adapter, abilities)]
        if not nodes:
            raise no_nodes(self._model.name.first)
        until = time.monotonic() + deadline_s
        try:
            return await call(nodes[0], len(nodes) == 1, deadline_s)
        except KvferryError as error:
            if isinstance(error, NodeLost) and time.monotonic() < until:
                self._nodes.breakers.node_failed(node_key(nodes[0]))
            if not error.retryable or time.monotonic() >= until or not may_repeat():
                raise
            if len(nodes) == 1 and not (isinstance(error, NodeLost) and await self._is_back(nodes[0], error, until)):
                raise
            log.info("%s did not answer a media request: %s", nodes[0].node_id, error)
            return await call(nodes[:2][-1], True, until - time.monotonic())

    async def _is_back(self, node: NodeLease, error: NodeLost, until: float) -> bool:
        """Return whether a node that was only silent is heard again within MAX_SILENCE_S and before a time."""
        until = min(until, time.monotonic() + MAX_SILENCE_S)
        while not isinstance(error, NodeDown) and time.monotonic() < until:
            if (entry := self._nodes.entries.get(node_key(node))) is not None and entry.reachable:
                return True
            await asyncio.sleep(CHECK_S)
        return False

    def _usable(self, adapter: str, abilities: Collection[str]) -> list[NodeEntry]:
        """Return the nodes that can be called now: unsuspected ones first, then encode nodes, then by least work.

        An encode node is called only for prompts that another node can compute."""
        breakers = self._nodes.breakers
        shut = breakers.open().nodes if breakers.any else ()
        able = [
            entry
            for entry in self._model.live
            if entry.reachable
            and entry.lease.state == "ready"
            and (holds(entry.lease, adapter) or entry.lease.role == "encode")
            and takes(entry.lease, abilities)
        ]
        fingerprints = {entry.lease.fingerprint for entry in able if entry.lease.role != "encode"}
        able = [entry for entry in able if entry.lease.fingerprint in fingerprints]
        return sorted(
            able,
            key=lambda entry: (
                entry.key in shut or entry.suspected,
                entry.lease.role != "encode",
                _work(entry.lease),
                random.random(),  # noqa: S311
            ),
        )


def _prompt(messages: Sequence[Any], node: NodeLease, files: Sequence[bytes]) -> tuple[tuple[int, ...], PromptMedia]:
    """Return tokens and media of a node's answer. Raises StepFailed if it is not a valid prompt."""
    try:
        prompt, *datas = messages
        media = joined(prompt.media, datas)
        media = with_files(media, files) if prompt.needs_files else media
        found = RenderedPrompt(prompt.token_ids, media, prompt.rope_offset)
    except (ValueError, AttributeError, WireError) as error:
        raise StepFailed(f"{node.node_id} answered with no prompt") from error
    if not isinstance(prompt, RenderedPrompt) or not found.sound:
        raise StepFailed(f"{node.node_id} answered with a prompt that is invalid")
    return found.token_ids, PromptMedia(found.media, node.fingerprint, found.rope_offset)


def _work(lease: NodeLease) -> int:
    return lease.load.running_requests + lease.load.waiting_requests
