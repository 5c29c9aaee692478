"""Two pools of nodes as queues in simulated time, and the metrics that their processes would show of them.

The figures come from the functions that nodes and routers use; times are made up: a prompt takes as long as its node's
rate says, a step of a decode node grows with each stream. What exceeds twice the
seats waits in the router for its turn, what exceeds the seats on the node.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial

from kvferry.placement.capacity import Capacity
from kvferry.protocol.lease import Load
from kvferry.router.tenants.arrival_rate import ArrivalRate
from kvferry.router.tenants.backlog import Backlog, Waiting
from kvferry.router.tenants.scheduler_slots import RUN_AHEAD
from kvferry.worker.scaling_signals import decode_pressure, latency_share, prefill_backlog_s
from tests.deploy.remote_write import STALE, Series, series

TICK_S = 0.5
START_S = 14.0
"""From a pod's creation to its first work, as it was on a real cluster."""
ALONE_S, STREAM_S, TARGET_S = 0.02, 0.0005, 0.05
"""A decode step with one stream, what each further one adds, and the target."""


@dataclass
class Prompt:
    tokens: float
    output: float


@dataclass
class Pod:
    """A node of either role: prompts in order, streams as tokens that are left of each, those that wait for a seat,
    since when the next of them does, seconds it was busy."""

    name: str
    ready_at: float
    leaving: bool = False
    prompts: deque[Prompt] = field(default_factory=deque)
    streams: list[float] = field(default_factory=list)
    waiting: deque[float] = field(default_factory=deque)
    next_since: float = 0.0
    busy_s: float = 0.0

    @property
    def tokens(self) -> float:
        return sum(prompt.tokens for prompt in self.prompts)


class Pools:
    """A router, prefill and decode pods. rate: prompt tokens a second of a node; seats: of a decode node."""

    def __init__(self, namespace: str, now: float, *, rate: float, seats: int, prefill: int, decode: int) -> None:
        self.namespace, self.rate, self.seats, self.now = namespace, rate, seats, now
        self.pods: dict[str, list[Pod]] = {"prefill": [], "decode": []}
        self.waiting: list[Prompt] = []
        self.done = 0
        self._made, self._output = 0, 0.0
        self._flow = ArrivalRate()
        self._backlog = Backlog(lambda: self._queue(held=False), _Holds(self), self._capacity)
        self._shown: set[Series] = set()
        self.scale("prefill", prefill, start_s=0.0)
        self.scale("decode", decode, start_s=0.0)

    def ready(self, role: str) -> list[Pod]:
        return [pod for pod in self.pods[role] if not pod.leaving and pod.ready_at <= self.now]

    def scale(self, role: str, count: int, start_s: float = START_S) -> None:
        """The Deployment has so many replicas now. Pods that start go first, then the youngest."""
        pods = [pod for pod in self.pods[role] if not pod.leaving]
        for _ in range(count - len(pods)):
            self._made += 1
            self.pods[role].append(Pod(f"{role}-{self._made}", self.now + start_s))
        for pod in sorted(pods, key=lambda pod: -pod.ready_at)[: max(0, len(pods) - count)]:
            pod.leaving = True

    def arrive(self, tokens: float, output: float) -> None:
        self.waiting.append(Prompt(tokens, output))
        self._flow.arrived(1, self.now)

    def tick(self) -> None:
        """A moment passes."""
        self.now += TICK_S
        while self.waiting and self._under_way() < RUN_AHEAD * self.seats * len(self.ready("decode")):
            prompt = self.waiting.pop(0)
            self._flow.started(1, self.now)
            pods = self.ready("prefill") or self.ready("decode")
            min(pods, key=lambda pod: pod.tokens).prompts.append(prompt)
        for pods in self.pods.values():
            for pod in pods:
                self._prefill(pod)
                self._decode(pod)
            pods[:] = [pod for pod in pods if not pod.leaving or pod.prompts or pod.streams or pod.waiting]

    def metrics(self) -> dict[Series, float]:
        """What a scrape of all of them finds now, with a mark for what it found before."""
        self._backlog.unplaced()
        made = partial(series, namespace=self.namespace)
        router = partial(made, pod="router-1", model_name="m")
        found = {
            router("kvferry_prefill_backlog_seconds"): self._backlog.prefill_s(),
            router("kvferry_decode_pressure"): self._backlog.decode_nodes(),
            router("kvferry_requests_held"): float(self._backlog.unplaced()),
            router("kvferry_output_tokens_total"): self._output,
        }
        for role, pods in self.pods.items():
            for pod in pods:
                if pod.ready_at <= self.now:
                    labelled = partial(made, pod=pod.name, role=role)
                    load = self._load(pod)
                    found[labelled("kvferry_prefill_backlog_seconds")] = prefill_backlog_s(load, self.rate)
                    found[labelled("kvferry_step_seconds_sum")] = pod.busy_s
                    latency = latency_share(_step_s(pod), ALONE_S, TARGET_S)
                    waits_s = self.now - pod.next_since if pod.waiting else 0.0
                    pressure = decode_pressure(load, self.seats, latency, waits_s) if role == "decode" else 0.0
                    found[labelled("kvferry_decode_pressure")] = pressure
        gone, self._shown = self._shown - found.keys(), set(found)
        return {**found, **dict.fromkeys(gone, STALE)}

    def _under_way(self) -> int:
        every = [pod for pods in self.pods.values() for pod in pods]
        return sum(len(pod.prompts) + len(pod.streams) + len(pod.waiting) for pod in every)

    def _queue(self, *, held: bool) -> Waiting:
        """What waits in the router: for a node where there is none, otherwise for its turn."""
        here = held != bool(self.ready("decode"))
        if not here:
            return Waiting()
        prompt, output = (round(sum(getattr(each, of) for each in self.waiting)) for of in ("tokens", "output"))
        begun_in_s = output * (ALONE_S + STREAM_S * (self.seats - 1)) / (self.seats * max(1, len(self.ready("decode"))))
        return Waiting(len(self.waiting), prompt, begun_in_s, self._flow.ratio)

    def _capacity(self) -> Capacity:
        prefills, decodes = self.ready("prefill") or self.ready("decode"), self.ready("decode")
        taken = sum(len(pod.streams) for pod in decodes)
        return Capacity(len(decodes) * self.seats, len(prefills) * self.rate, len(decodes), len(prefills), taken)

    def _load(self, pod: Pod) -> Load:
        blocks = round(100 * len(pod.streams) / self.seats)
        return Load(
            waiting_requests=len(pod.prompts) + len(pod.waiting), waiting_tokens=round(pod.tokens),
            running_requests=len(pod.streams), active_blocks=blocks, free_blocks=100 - blocks, total_blocks=100,
        )  # fmt: skip

    def _prefill(self, pod: Pod) -> None:
        left = self.rate * TICK_S
        while pod.prompts and left > 0:
            done = min(left, pod.prompts[0].tokens)
            pod.prompts[0].tokens -= done
            left -= done
            pod.busy_s += done / self.rate
            if pod.prompts[0].tokens <= 0:
                prompt = pod.prompts.popleft()
                to = self.ready("decode") or self.pods["decode"]
                least = min(to, key=lambda other: len(other.streams) + len(other.waiting))
                if not least.waiting:
                    least.next_since = self.now
                least.waiting.append(prompt.output)

    def _decode(self, pod: Pod) -> None:
        drawn = TICK_S / _step_s(pod)
        self._output += drawn * len(pod.streams)
        left = [tokens - drawn for tokens in pod.streams]
        pod.streams = [tokens for tokens in left if tokens > 0]
        self.done += len(left) - len(pod.streams)
        while pod.waiting and len(pod.streams) < self.seats:
            pod.streams.append(pod.waiting.popleft())
            pod.next_since = self.now


class _Holds:
    """Requests that no node can take."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    @property
    def requests(self) -> int:
        return self._pools._queue(held=True).sequences

    @property
    def tokens(self) -> int:
        return self._pools._queue(held=True).prompt


def _step_s(pod: Pod) -> float:
    return ALONE_S + STREAM_S * max(0, len(pod.streams) - 1)
