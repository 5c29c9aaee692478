"""A simulated node: prompts in a queue, streams as one batch, a block pool, a link."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from protocol.layout import blocks_for
from protocol.lease import Rates
from simulate.ask import Run
from simulate.clock import Clock
from simulate.cores import Cores
from simulate.machine import Machine
from simulate.memory import Memory
from simulate.prompts import Prompt, Prompts
from simulate.streams import Streams

WEIGHT = 0.1
"""Of a new observation in the rates that its lease tells (node/rates.py)."""
LEAST_TOKENS = 32
"""Fewer say nothing about a prompt's speed."""


class Node:
    """Between two events its batch is the same and each step takes as long: it goes on by arithmetic, not by steps.
    What a prompt or a stream needs is held from its beginning to its end, so nothing is preempted.

    busy_s    spent computing prompts
    computed  prompt tokens
    """

    def __init__(self, name: str, role: str, model: str, machine: Machine, clock: Clock, eviction: str) -> None:
        self.name, self.role, self.model, self.machine, self.clock = name, role, model, machine, clock
        self.memory = Memory(machine.blocks, eviction)
        self.prompts, self.streams = Prompts(), Streams()
        self.epoch, self.alive, self.dirty = 1, True, False
        self.granted: dict[Run, int] = {}
        self.busy_s, self.computed, self.link_free = 0.0, 0, 0.0
        self._cores = Cores()
        self._asking: deque[tuple[Run, Callable[[int], None]]] = deque()
        self._at, self._plan = 0.0, 0
        self._rate, self._step_s = machine.prefill_tokens_per_s, machine.decode_s(1, 0)

    @property
    def asking(self) -> int:
        return len(self._asking) + len(self.prompts.waiting)

    def share(self, cores: Cores) -> None:
        """Compute there from now on, with others; nothing is here yet."""
        self._cores = cores
        cores.join(self, self._advance, self._go_on)

    # What is asked of it.

    def grant(self, run: Run, granted: Callable[[int], None]) -> None:
        """Hold what the stream will need, once there is room and a seat; `granted` is told how many blocks are here."""
        self._asking.append((run, granted))
        self._seat()

    def compute(self, run: Run, done: Callable[[], None]) -> None:
        """The prompt, when its turn comes; `done` when its next token is there."""
        self._advance()
        self.prompts.enter(run, run.length - self._reusable(run), done)
        self._go_on()

    def join(self, run: Run, tokens: int, done: Callable[[], None]) -> None:
        """A stream that is whole here begins: so many more tokens."""
        self._advance()
        self.granted.pop(run, None)
        self.streams.join(run, tokens, done)
        self._go_on()

    def keep(self, owner: Run, hashes: Sequence[bytes]) -> None:
        """What the owner's blocks hold is known now."""
        self.memory.fill(owner, hashes)
        self.dirty = True

    def copy(self, run: Run, hashes: Sequence[bytes]) -> None:
        self.memory.copy(("copy", run), hashes)
        self.dirty = True

    def give(self, owner: Run) -> None:
        self.memory.give(owner)
        self.granted.pop(owner, None)
        self.dirty = True
        self._seat()
        self._advance()
        self._go_on()

    def drop(self, run: Run) -> None:
        """Forget it."""
        self._advance()
        self.prompts.drop(run)
        self._asking = deque(each for each in self._asking if each[0] is not run)
        self.streams.drop(run)
        self.give(run)

    def die(self) -> list[Run]:
        """All that was here is gone; a new process follows when the caller says so. Returns whom it had."""
        self._advance()
        here = self.streams.break_off() + [run for run, _ in self._asking] + list(self.granted)
        here += [prompt.run for prompt in (*self.prompts.waiting, *self.prompts.begun)]
        self.memory = Memory(self.memory.num_blocks, self.memory.eviction)
        self.prompts, self.granted = Prompts(), {}
        self._asking.clear()
        self.alive = False
        self._go_on()
        return list(dict.fromkeys(here))

    def live(self) -> None:
        """A new process."""
        self.alive, self.epoch, self._at = True, self.epoch + 1, self.clock.now

    def rates(self) -> Rates:
        """What it has learned of itself."""
        self._advance()
        return Rates(self._rate, self._step_s, self.machine.ship_bytes_per_s)

    # How it goes on.

    def _reusable(self, run: Run) -> int:
        """Tokens found here, of whole blocks; one at least is always computed."""
        size = self.machine.block_size
        return self.memory.found(run.ask.hashes[: (run.length - 1) // size]) * size

    def _seat(self) -> None:
        size = self.machine.block_size
        while self._asking and len(self.streams) + len(self.granted) < self.machine.max_num_seqs:
            run, granted = self._asking[0]
            blocks = blocks_for(run.ask.prompt_len + run.ask.output_len, size)
            here = self.memory.take(run, run.ask.hashes[: run.length // size], blocks)
            if here is None:
                return
            self._asking.popleft()
            self.granted[run] = blocks - here
            granted(here)

    def _begin(self, prompt: Prompt) -> bool:
        """Its blocks, if there are enough; on the node that will decode it has them already."""
        run, size = prompt.run, self.machine.block_size
        if run.decode is self:
            start = run.here * size
        else:
            found = self.memory.take(run, run.ask.hashes[: (run.length - 1) // size], blocks_for(run.length, size))
            if found is None:
                return False
            start = found * size
        run.begun_s = self.clock.now
        prompt.start, prompt.tokens = start, run.length - start
        prompt.work = prompt.left = self.machine.work(start, run.length)
        if run.cached_len < 0:
            run.cached_len = start
        return True

    def _speed(self, prompt: Prompt | None) -> tuple[float, float]:
        """Steps of streams and work on the prompt, in a second."""
        machine, count, share = self.machine, len(self.streams), self._cores.share(self)
        if not count:
            return 0.0, share * machine.prefill_tokens_per_s if prompt else 0.0
        step_s = machine.decode_s(count, self.streams.context)
        if prompt is None:
            self._step_s = step_s / share
            return share / step_s, 0.0
        step_s += machine.chunk_tokens / machine.prefill_tokens_per_s
        return share / step_s, share * machine.chunk_tokens / step_s

    def _advance(self) -> None:
        """To now, as planned."""
        passed, self._at = self.clock.now - self._at, self.clock.now
        if passed <= 0:
            return
        prompt = min(self.prompts.begun) if self.prompts.begun else None
        steps, work = self._speed(prompt)
        self.streams.go_on(steps * passed)
        if prompt is not None:
            prompt.left = max(0.0, prompt.left - work * passed)
            self.prompts.worked += work * passed
            prompt.spent_s += passed
            self.busy_s += passed

    def _go_on(self) -> None:
        """Plan the next event."""
        prompt = self.prompts.next(self._begin)
        steps, work = self._speed(prompt)
        ends = [prompt.left / work] if prompt else []
        if self.streams:
            ends.append(self.streams.next_end / steps)
        self._plan += 1
        if ends:
            plan = self._plan
            self.clock.soon(max(0.0, min(ends)), lambda: self._happens(plan))
        self._cores.works(self, bool(ends))

    def _happens(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._advance()
        prompt = min(self.prompts.begun) if self.prompts.begun else None
        ended: list[Callable[[], None]] = []
        if prompt is not None and prompt.left < 1e-6 * prompt.work + 1e-9:
            self.prompts.begun.remove(prompt)
            self._computed(prompt)
            ended.append(prompt.done)
        ended += self.streams.ended()
        self._go_on()
        for done in ended:
            done()

    def _computed(self, prompt: Prompt) -> None:
        self.computed += prompt.tokens
        if not self.streams and prompt.tokens >= LEAST_TOKENS and prompt.spent_s > 0:
            self._rate += WEIGHT * (prompt.tokens / prompt.spent_s - self._rate)
