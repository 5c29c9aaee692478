"""Checker: validates clients' grammars in a child process, which is killed and replaced if grammars take too long.

The caller's process compiles nothing, waits for at most `CHECK_S`, and survives whatever a grammar does to the library.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, field

from kvferry.protocol.errors import InvalidRequest, Overloaded
from kvferry.protocol.work import Grammar
from kvferry.structured_output.to_lark import check_length
from kvferry.structured_output.vocabulary import Vocabulary

log = logging.getLogger("kvferry.structured_output")

CHECK_S = 10.0
"""Deadline of one grammar's validation, in seconds of wall-clock time."""
START_S = 60.0
PENDING = 256
"""Maximum number of grammars of one tenant that are validated or wait for it."""
AT_ONCE = 8
"""Maximum number of grammars of one tenant in the child process, so that other tenants wait behind no more."""
KNOWN = 4096
"""Maximum number of verdicts in the cache."""
RUNAWAYS = 4
"""Validations past their deadline after which the child process is killed and replaced."""
_TRIES = 2


@dataclass(slots=True, eq=False)
class _Trial:
    grammar: Grammar
    verdict: asyncio.Future[str | None]
    lane: _Lane
    tries: int = 0


@dataclass(slots=True, eq=False)
class _Lane:
    """Bounds of one tenant."""

    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    pending: int = 0


@dataclass(slots=True, eq=False)
class _Child:
    process: asyncio.subprocess.Process
    pending: dict[int, _Trial] = field(default_factory=dict)
    runaways: int = 0


class Checker:
    """Grammar checker for one vocabulary.

    Starts the child process with the first grammar and ends it in `close`. Call it on the event loop only."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], command: tuple[str, ...] = ()) -> None:
        self._vocabulary = vocabulary
        self._command = command or (sys.executable, "-m", "kvferry.structured_output.checker_process")
        self._known: OrderedDict[str, str | None] = OrderedDict()
        self._pending: dict[str, _Trial] = {}
        self._lanes: dict[str, _Lane] = {}
        self._child: _Child | None = None
        self._starting = asyncio.Lock()
        self._closed = False
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def check(self, grammar: Grammar, param: str, tenant: str = "") -> None:
        """Raise InvalidRequest if the grammar cannot be used: it names the field `param` and the limit.

        Raises Overloaded if too many grammars wait, or if its process was killed twice because of other grammars."""
        try:
            check_length(grammar)
        except InvalidRequest as error:
            raise InvalidRequest(f"{param}: {error.message}", param=param) from None
        key = hashlib.sha256(repr(astuple(grammar)).encode(errors="surrogatepass")).hexdigest()
        if key in self._known:
            self._known.move_to_end(key)
            wrong = self._known[key]
        else:
            wrong = await self._learn(key, grammar, tenant)
        if wrong is not None:
            raise InvalidRequest(f"{param}: {wrong}", param=param)

    async def close(self) -> None:
        """End the child process. Callers that still wait for a verdict get Overloaded."""
        self._closed = True
        if self._child is not None:
            self._end(self._child)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _learn(self, key: str, grammar: Grammar, tenant: str) -> str | None:
        """Validate the grammar; return its error, or None."""
        trial = self._pending.get(key)
        if trial is None:
            lane = self._lanes.setdefault(tenant, _Lane())
            if lane.pending >= PENDING:
                raise Overloaded(f"{PENDING} grammars are being checked; retry in a second", retry_after=1)
            lane.pending += 1
            trial = self._pending[key] = _Trial(grammar, asyncio.get_running_loop().create_future(), lane)
            task = asyncio.create_task(self._try(key, trial))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(trial.verdict)

    async def _try(self, key: str, trial: _Trial) -> None:
        """Validate until there is a verdict. A timeout is not cached: the machine may have been busy."""
        wrong: str | None
        try:
            while not trial.verdict.done():
                trial.tries += 1
                async with trial.lane.turns:
                    wrong = await self._verdict(trial)
                if wrong in (_DIED, _ENDED) and trial.tries < _TRIES:
                    continue
                if wrong is _ENDED:
                    raise Overloaded("the check was interrupted because other grammars took too long", retry_after=1)
                trial.verdict.set_result(wrong)
                if wrong is not _LATE:
                    self._known[key] = wrong
                if len(self._known) > KNOWN:
                    self._known.popitem(last=False)
        except Exception as error:
            trial.verdict.set_exception(error)
        finally:
            trial.lane.pending -= 1
            del self._pending[key]

    async def _verdict(self, trial: _Trial) -> str | None:
        child = await self._ready()
        self._number += 1
        number = self._number
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        child.pending[number] = _Trial(trial.grammar, answer, trial.lane)
        assert child.process.stdin is not None
        line = json.dumps([number, astuple(trial.grammar)]) + "\n"
        try:
            with contextlib.suppress(ConnectionError):
                child.process.stdin.write(line.encode())
            async with asyncio.timeout(CHECK_S):
                return await answer
        except TimeoutError:
            child.runaways += 1
            if child.runaways >= RUNAWAYS:
                log.info("%d grammars took too long; killing their process", child.runaways)
                self._end(child)
            return _LATE
        finally:
            child.pending.pop(number, None)

    async def _ready(self) -> _Child:
        """Return the child process, started if need be. Raises InvalidRequest if the tokenizer cannot be read."""
        async with self._starting:
            if self._closed:
                raise Overloaded("this server is shutting down", retry_after=1)
            if self._child is not None:
                return self._child
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            assert process.stdin is not None
            assert process.stdout is not None
            vocabulary = await asyncio.to_thread(lambda: json.dumps(asdict(self._vocabulary())) + "\n")
            try:
                process.stdin.write(vocabulary.encode())
                async with asyncio.timeout(START_S):
                    first = await process.stdout.readline()
            except (ConnectionError, TimeoutError) as error:
                process.kill()
                raise Overloaded("grammars cannot be checked now: the checker did not start") from error
            wrong = json.loads(first)[1] if first else "its process ended"
            if wrong is not None:
                process.kill()
                raise InvalidRequest(f"this server cannot use grammars: {wrong}")
            child = self._child = _Child(process)
            task = asyncio.create_task(self._listen(child))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return child

    async def _listen(self, child: _Child) -> None:
        assert child.process.stdout is not None
        try:
            while line := await child.process.stdout.readline():
                number, wrong = json.loads(line)
                trial = child.pending.get(number)
                if trial is not None and not trial.verdict.done():
                    trial.verdict.set_result(wrong)
        except ValueError:
            log.exception("the grammar checker sent an unreadable message")
        finally:  # without a reader the process gets no more grammars
            self._end(child)
            for trial in child.pending.values():
                if not trial.verdict.done():
                    trial.verdict.set_result(_ENDED if child.runaways >= RUNAWAYS else _DIED)
        await child.process.wait()

    def _end(self, child: _Child) -> None:
        if self._child is child:
            self._child = None
        with contextlib.suppress(ProcessLookupError):
            child.process.kill()


_DIED = "the grammar crashed the process that compiles it"
_ENDED = "the process was ended because other grammars took too long"
_LATE = f"the grammar was not ready within {CHECK_S:.0f} s, which is the limit"
