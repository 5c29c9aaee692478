"""Measures a running cluster by requests to its router, for the rates that leases do not contain (`--probe`).

A few requests to an idle cluster measure the fixed cost of a request, the step time that each stream adds, and how
prompts and streams slow each other down."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from statistics import linear_regression, mean, median
from typing import NamedTuple

import httpx

from kvferry.protocol.errors import ConfigError
from kvferry.simulate.choices import check_known
from kvferry.simulate.machine import Machine

LENGTHS = (64, 320, 768)
"""Tokens of the prompts that are computed alone."""
ROUNDS = 3
"""Measured rounds per length; their median counts. A first round, to warm up, does not count."""
STREAMS, TOKENS = 3, 24
"""Concurrent streams, and tokens of each of them and of a single one."""
BESIDE_TOKENS = 400
"""Maximum number of tokens of a stream beside which a prompt is computed; it is cancelled once the prompt is done."""
MIN_SHARE, OWN = 0.05, 0.9
"""Bounds of the share of its speed that a prompt keeps beside streams.

It is at least MIN_SHARE. From OWN on, the prefill node counts as having cores of its own."""
TIMEOUT_S = 60.0
"""Timeout of a request, in seconds."""


class Answered(NamedTuple):
    """Seconds to the first token, and mean seconds between two tokens."""

    first_s: float
    between_s: float


@dataclass(frozen=True, slots=True)
class ProbeClient:
    """Client of one router, which sends probe requests.

    model: name that the router knows. longest: context length in tokens. client: sends the API key."""

    url: str
    model: str
    longest: int
    client: httpx.AsyncClient

    async def ask(self, prompt: Sequence[int], output: int) -> Answered:
        """Send a prompt, read `output` tokens and return their timing. Raises ConfigError."""
        body = {"model": self.model, "prompt": list(prompt), "max_tokens": output, "ignore_eos": True, "stream": True}
        began, times = time.monotonic(), []
        async with self.client.stream("POST", f"{self.url}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise ConfigError(f"{self.url} answered a probe with status {answer.status_code}", param="probe")
            async for line in lines(answer):
                if line.startswith(b"data: {") and json.loads(line[6:]).get("choices"):
                    times.append(time.monotonic())
        if not times:
            raise ConfigError(f"{self.url} answered a probe without a token", param="probe")
        return Answered(times[0] - began, (times[-1] - times[0]) / max(1, output - 1))


async def lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Split an event stream into lines of bytes.

    Only \\n ends a line; httpx's text lines would also split at other line ends within outputs."""
    rest = b""
    async for data in answer.aiter_bytes():
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line


async def probed(url: str, machine: Machine, api_key: str = "", model: str = "") -> Machine:
    """Return `machine` with rates measured on the router's cluster, for that model (default: its first one).

    Raises ConfigError if the router cannot be probed."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with httpx.AsyncClient(timeout=TIMEOUT_S, headers=headers, trust_env=False) as client:
            return await _probe(await _connect(url.rstrip("/"), client, model), machine)
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"{url} cannot be probed: {str(error) or repr(error)}", param="probe") from error


async def _connect(url: str, client: httpx.AsyncClient, name: str) -> ProbeClient:
    answer = await client.get(f"{url}/v1/models")
    if answer.status_code != 200:
        raise ConfigError(f"{url} answered with status {answer.status_code}, not with a list of models", param="probe")
    models = answer.json()["data"]
    if name:
        check_known("model", name, [model["id"] for model in models])
    model = next(model for model in models if model["id"] == name) if name else models[0]
    return ProbeClient(url, model["id"], int(model.get("max_model_len") or 4096), client)


async def _probe(client: ProbeClient, machine: Machine) -> Machine:
    source = random.Random()
    most = max(1, (client.longest - 1) // 2)
    lengths = sorted({min(length, most) for length in LENGTHS})
    if len(lengths) < 2:
        raise ConfigError(f"a context of {client.longest} tokens is too short for probes", param="probe")
    firsts: dict[int, list[float]] = {length: [] for length in lengths}
    steps: list[float] = []
    for _ in range(1 + ROUNDS):
        for length in lengths:
            answered = await client.ask(_prompt(source, length), min(TOKENS, most))
            firsts[length].append(answered.first_s)
            steps.append(answered.between_s)
    alone_s = {length: median(times[1:]) for length, times in firsts.items()}
    overhead_s, rate = fitted(alone_s, machine)
    together = await asyncio.gather(
        *(client.ask(_prompt(source, lengths[0]), min(TOKENS, most)) for _ in range(STREAMS))
    )
    one_s, all_s = median(steps[len(lengths) :]), mean(each.between_s for each in together)
    stream_s = max(0.0, all_s - one_s) / (STREAMS - 1)
    beside_s = await _beside_s(client, source, lengths[-1], min(BESIDE_TOKENS, most))
    return replace(
        machine,
        overhead_s=overhead_s,
        prefill_tokens_per_s=rate,
        step_s=max(1e-6, one_s - stream_s),
        stream_s=stream_s,
        beside=share(alone_s[lengths[-1]], beside_s, overhead_s),
    )


def fitted(alone_s: dict[int, float], machine: Machine) -> tuple[float, float]:
    """Fit the fixed seconds of a request and the prompt tokens per second, by linear regression.

    alone_s: seconds to the first token by prompt length. Raises ConfigError if longer prompts took no longer."""
    work, times = [machine.work(0, length) for length in alone_s], list(alone_s.values())
    token_s, overhead_s = linear_regression(work, times)
    if token_s <= 0:
        raise ConfigError("probes of longer prompts took no longer: the cluster is not idle", param="probe")
    if overhead_s < 0:
        token_s, overhead_s = linear_regression(work, times, proportional=True)
    return overhead_s, 1 / token_s


def share(alone_s: float, beside_s: float, overhead_s: float) -> float:
    """Return the share of its speed that a prompt keeps beside streams."""
    kept = max(MIN_SHARE, (alone_s - overhead_s) / max(1e-6, beside_s - overhead_s))
    return kept if kept < OWN else 1.0


async def _beside_s(client: ProbeClient, source: random.Random, length: int, tokens: int) -> float:
    """Return the seconds to the first token of such a prompt beside a stream: the median of ROUNDS."""
    found = []
    for _ in range(ROUNDS):
        stream = asyncio.create_task(client.ask(_prompt(source, 16), tokens))
        try:
            await asyncio.sleep(0.2)
            found.append((await client.ask(_prompt(source, length), 1 + (length > 1))).first_s)
        finally:
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)
    return median(found)


def _prompt(source: random.Random, length: int) -> list[int]:
    """Return random tokens that exist in every vocabulary; no cached prefix matches them."""
    return source.choices(range(100, 1000), k=length)
