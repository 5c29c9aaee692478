"""Node: simulated prefill or decode node: a prompt queue, a decode batch, a block pool, tiers and a link."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvferry.protocol.labels import OWN_TIERS
from kvferry.protocol.lease import Rates
from kvferry.simulate.clock import Clock
from kvferry.simulate.cores import Cores
from kvferry.simulate.grants import Granted, Grants
from kvferry.simulate.machine import Machine
from kvferry.simulate.memory import Memory
from kvferry.simulate.prompts import Prompt, Prompts
from kvferry.simulate.streams import Streams
from kvferry.simulate.tiers import Tiers
from kvferry.simulate.trace_request import RequestRun
from kvferry.worker.step_time_fit import StepTimeFit

WEIGHT = 0.1
"""Weight of a new observation in the rates that the node's lease announces (worker/rates.py)."""
MIN_TOKENS = 32
"""Prompt tokens below which a prompt says nothing about the node's speed."""


class Node:
    """Simulated node that advances from event to event by arithmetic, not step by step.

    Between two events the batch stays the same, so every step takes the same time. A prompt or stream holds all the
    blocks it needs from start to end, so nothing is preempted.

    busy_s: seconds spent on prompts. computed: prompt tokens computed."""

    def __init__(self, name: str, role: str, model: str, machine: Machine, clock: Clock, eviction: str) -> None:
        self.name, self.role, self.model, self.machine, self.clock = name, role, model, machine, clock
        self.eviction = eviction
        self.memory = Memory(machine.blocks, eviction, clock.time)
        self.tiers = Tiers(machine, clock)
        self.prompts, self.streams = Prompts(), Streams()
        self.epoch, self.alive, self.dirty = 1, True, False
        self.grants = Grants(machine)
        self.busy_s, self.computed, self.link_free = 0.0, 0, 0.0
        self._cores = Cores()
        self._at, self._plan = 0.0, 0
        self._rate, self._step_s = machine.prefill_tokens_per_s, machine.decode_s(1, 0)
        self._stream_rates = StepTimeFit(self._step_s)

    @property
    def num_waiting(self) -> int:
        """Return the number of requests that wait here for a grant, a tier read or computing."""
        return self.grants.num_waiting + len(self.tiers.reading) + len(self.prompts.waiting)

    def share(self, cores: Cores) -> None:
        """Compute on these cores, shared with other nodes, from now on; the node must be empty."""
        self._cores = cores
        cores.join(self, self._advance, self._plan_next)

    # Called by the world.

    def grant(self, run: Run, granted: Granted) -> None:
        """Reserve blocks and a seat for the stream; `granted` is then called with the blocks already here."""
        self.grants.ask(run, granted)
        self._grant_waiting()

    def compute(self, run: Run, done: Callable[[], None]) -> None:
        """Compute the prompt in turn, after tier reads; `done` is called with its next token there."""
        self.tiers.bring(run, self.memory, run.decode is self, lambda: self._enter(run, done))

    def join(self, run: Run, tokens: int, done: Callable[[], None]) -> None:
        """Start a stream, whose blocks are all here, that has `tokens` more tokens to generate."""
        self._advance()
        self.grants.held.pop(run, None)
        self.streams.join(run, tokens, done)
        self._plan_next()

    def keep(self, owner: Run, hashes: Sequence[bytes]) -> None:
        """Register the content of the owner's blocks."""
        self.memory.fill(owner, hashes)
        self.tiers.write(hashes)
        self.dirty = True

    def copy(self, run: Run, hashes: Sequence[bytes]) -> None:
        """Cache blocks of a run that another node computed, if there are enough blocks."""
        if self.memory.copy(("copy", run), hashes):
            self.tiers.write(hashes)
        self.dirty = True

    def release(self, owner: Run) -> None:
        """Release the owner's blocks and grant, and seat requests that wait."""
        self.memory.release_owner(owner)
        self.grants.held.pop(owner, None)
        self.dirty = True
        self._grant_waiting()
        self._advance()
        self._plan_next()

    def drop(self, run: Run) -> None:
        """Remove a run and everything that it holds."""
        self._advance()
        self.prompts.drop(run)
        self.tiers.drop(run, self.memory)
        self.grants.drop(run)
        self.streams.drop(run)
        self.release(run)

    def die(self) -> list[Run]:
        """Lose everything but the disk tier; return the runs that were here. `live` starts a new process."""
        self._advance()
        here = [*self.streams.break_off(), *self.grants]
        here += self.tiers.reading
        here += [prompt.run for prompt in (*self.prompts.waiting, *self.prompts.begun)]
        self.memory = Memory(self.memory.num_blocks, self.eviction, self.clock.time)
        self.tiers.die()
        self.prompts, self.grants = Prompts(), Grants(self.machine)
        self.alive = False
        self._plan_next()
        return list(dict.fromkeys(here))

    def live(self) -> None:
        """Start a new process with the next epoch."""
        self.alive, self.epoch, self._at, self.dirty = True, self.epoch + 1, self.clock.now, True

    def rates(self) -> Rates:
        """Return the rates that the node has learned."""
        self._advance()
        streams, block_s = self._stream_rates, {tier.name: tier.block_s for tier in self.tiers}
        read_s = {f"{each}_block_s": block_s.get(each, 0.0) for each in OWN_TIERS}
        ship = self.machine.ship_bytes_per_s
        return Rates(self._rate, self._step_s, ship, alone_s=streams.alone_s, stream_s=streams.stream_s, **read_s)

    # Progress.

    def _enter(self, run: Run, done: Callable[[], None]) -> None:
        """Queue the prompt, whose blocks from tiers are now in the pool."""
        reusable = self._reusable(run)
        if any(self.tiers):
            if run.decode is self:
                run.here = max(run.here, reusable // self.machine.block_size)
                self.memory.fill(run, run.ask.hashes[: run.here])
            self.dirty = True
        self._advance()
        self.prompts.enter(run, run.length - reusable, done)
        self._plan_next()

    def _reusable(self, run: Run) -> int:
        """Return the prompt tokens of whole blocks in the pool; at least one token is always computed."""
        size = self.machine.block_size
        return self.memory.found(run.ask.hashes[: (run.length - 1) // size]) * size

    def _grant_waiting(self) -> None:
        self.grants.grant_waiting(self.memory, len(self.streams))

    def _begin(self, prompt: Prompt) -> bool:
        """Reserve the prompt's blocks and start it; return False without enough blocks.

        On the node that will decode it, the grant has reserved them already."""
        run, size = prompt.run, self.machine.block_size
        if run.decode is self:
            start = run.here * size
        else:
            wanted, blocks = run.ask.hashes[: (run.length - 1) // size], self.machine.blocks_for(run.length)
            found = self.memory.take(run, wanted, blocks, cache_use=run.ask.cache_use)
            if found is None:
                return False
            start = found * size
        run.begun_s = self.clock.now
        prompt.start, prompt.tokens = start, run.length - start
        prompt.work = prompt.left = self.machine.work(start, run.length) + self.machine.encode_work(run.encode_tokens)
        if run.cached_len < 0:
            run.cached_len = start
        return True

    def _speed(self, prompt: Prompt | None) -> tuple[float, float]:
        """Return decode steps and prompt work per second."""
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
        """Advance streams and prompt to the current time."""
        passed, self._at = self.clock.now - self._at, self.clock.now
        if passed <= 0:
            return
        prompt = min(self.prompts.begun) if self.prompts.begun else None
        steps, work = self._speed(prompt)
        if steps:
            self._stream_rates.observe(len(self.streams), 1 / steps, pure=prompt is None)
        self.streams.advance(steps * passed)
        if prompt is not None:
            prompt.left = max(0.0, prompt.left - work * passed)
            self.prompts.computed(work * passed)
            prompt.spent_s += passed
            self.busy_s += passed

    def _plan_next(self) -> None:
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
        for done in ended:
            done()
        self._plan_next()

    def _computed(self, prompt: Prompt) -> None:
        self.computed += prompt.tokens
        if not (self.streams or prompt.run.encode_tokens) and prompt.tokens >= MIN_TOKENS and prompt.spent_s > 0:
            self._rate += WEIGHT * (prompt.tokens / prompt.spent_s - self._rate)


Run = RequestRun[Node]
"""Run on these nodes."""
