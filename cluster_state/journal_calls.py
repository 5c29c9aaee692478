"""Calls of the journals' scripts in Redis or Valkey, by name: directly, or through a node while the store is silent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import redis.asyncio as redis

from kvferry.cluster_state import journal_scripts
from kvferry.cluster_state.redis_client import Script, sensible
from kvferry.protocol.errors import RegistryFull, RegistryRefuses, RegistryUnavailable
from kvferry.runtime.background import end

log = logging.getLogger("kvferry.journal")

SCRIPTS = {
    "open": journal_scripts.OPEN,
    "append": journal_scripts.APPEND,
    "read": journal_scripts.READ,
    "claim": journal_scripts.CLAIM,
    "release": journal_scripts.RELEASE,
}
"""Scripts by the name under which routers call them through nodes."""
NEEDS_LEASES = ("read", "claim")
"""Scripts that read the leases of routers."""
WAIT_S = 0.4
"""Seconds without an answer of the store after which a node is asked as well."""
PROBE_S = 0.25
"""Seconds between two tries to reach a silent store directly."""
NO_RELAY_S = 0.5
"""Seconds for which calls fail at once after neither the store nor a node answered."""

ANSWERS = (RegistryFull, RegistryRefuses)
"""Errors that are answers of the store."""

Values = tuple[bytes, ...]
"""Answer of a script: numbers as text, empty for nil."""


class JournalScripts(Protocol):
    """Runner of the journals' scripts."""

    async def run(self, name: str, args: Sequence[str | bytes | int]) -> Values:
        """Return the answer of a script. Raises RegistryUnavailable; every call may be repeated."""


class RedisJournalScripts:
    """Scripts of one cluster's journals on a client of its own or of another store. Implements JournalScripts."""

    def __init__(self, client: redis.Redis, cluster: str, timeout_s: float) -> None:
        journals, leases = f"kvferry:{cluster}:j:", f"kvferry:{cluster}:o:leases"
        self._scripts = {name: Script(client, text, timeout_s) for name, text in SCRIPTS.items()}
        self._keys = {name: [journals, leases] if name in NEEDS_LEASES else [journals] for name in SCRIPTS}

    async def run(self, name: str, args: Sequence[str | bytes | int]) -> Values:
        answer = await self._scripts[name].run(self._keys[name], list(args))
        with sensible():
            return _values(answer)


class ScriptFailover:
    """Calls the store directly, and through a node when it is silent. Implements JournalScripts.

    A call that waits for WAIT_S is repeated through a node; its answer counts. From then on calls take the way through
    nodes only, and a task tries the store until it answers. So a router that is cut off from the store records its
    streams all the same, and while the store is away for all, calls fail at once.

    relay: calls a node; None: there is none."""

    def __init__(self, direct: JournalScripts, relay: JournalScripts | None = None) -> None:
        self.relay = relay
        self._direct = direct
        self._probing: asyncio.Task[None] | None = None
        self._no_relay_until = 0.0

    async def run(self, name: str, args: Sequence[str | bytes | int]) -> Values:
        if self.relay is None:
            return await self._direct.run(name, args)
        if self._probing is not None:
            return await self._relayed(self.relay, name, args)
        direct = asyncio.ensure_future(self._direct.run(name, args))
        try:
            await asyncio.wait({direct}, timeout=WAIT_S)
            if direct.done() and not _is_silent(direct):
                return direct.result()
            return await self._first_answer(direct, asyncio.ensure_future(self._relayed(self.relay, name, args)))
        except asyncio.CancelledError:
            direct.cancel()
            raise

    async def _first_answer(self, direct: asyncio.Future[Values], relayed: asyncio.Future[Values]) -> Values:
        """Return the first answer on either way, or raise the error of the direct one.

        An error of the node does not count while the direct call waits: the node's own access to the store may be at
        fault. A direct call without an answer is not cancelled, since that would cost its connection."""
        relayed.add_done_callback(_is_silent)  # retrieves its error if nobody else does
        pending = {call for call in (direct, relayed) if not call.done()}
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if direct in done and not _is_silent(direct):
                    return direct.result()
                if relayed in done and not relayed.exception():
                    break
        finally:
            relayed.cancel()
        self._begin_probing()
        direct.add_done_callback(self._direct_ended)
        return direct.result() if _is_silent(relayed) else relayed.result()

    def _direct_ended(self, call: asyncio.Future[Values]) -> None:
        """Use the store directly again if a call that it had not answered has an answer after all."""
        if not _is_silent(call) and self._probing is not None:
            self._probing.cancel()
            self._answers_again()

    async def close(self) -> None:
        """Stop trying the store."""
        if self._probing is not None:
            await end(self._probing)

    async def _relayed(self, relay: JournalScripts, name: str, args: Sequence[str | bytes | int]) -> Values:
        now = asyncio.get_running_loop().time()
        if now < self._no_relay_until:
            raise RegistryUnavailable("Redis does not answer, and no node reaches it")
        try:
            return await relay.run(name, args)
        except RegistryUnavailable as error:
            if not isinstance(error, ANSWERS):
                self._no_relay_until = asyncio.get_running_loop().time() + NO_RELAY_S
            raise

    def _begin_probing(self) -> None:
        if self._probing is None:
            log.info("Redis is silent: journals take the way through nodes")
            self._probing = asyncio.create_task(self._probe(), name="journal-probe")

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(PROBE_S)
            try:
                await self._direct.run("read", ["", "", 0, 0])
            except ANSWERS:
                break
            except RegistryUnavailable:
                continue
            break
        self._answers_again()

    def _answers_again(self) -> None:
        self._probing, self._no_relay_until = None, 0.0
        log.info("Redis answers: journals are written to it directly")


def _is_silent(call: asyncio.Future[Values]) -> bool:
    """Return whether a finished call got no answer of the store."""
    if call.cancelled():
        return True
    error = call.exception()
    return isinstance(error, RegistryUnavailable) and not isinstance(error, ANSWERS)


def _values(answer: Any) -> Values:
    if answer is None or answer is False:
        return ()
    return tuple(map(_bytes, answer)) if isinstance(answer, list) else (_bytes(answer),)


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else b"%d" % int(value)
