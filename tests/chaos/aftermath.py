"""What is left when everybody has gone: books, holds by cause, requests in progress, and what a leak would show in."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.chaos.plan import ROUTERS
from tests.chaos.stage import Stage

IDLE_S = 30.0
INFLIGHT = "kvferry_requests_inflight"
VIOLATIONS = {"node": "kvferry_account_violations_total", "router": "kvferry_received_account_violations_total"}
"""Wrong accounts of prompts, as the node counts them and as routers do: of a killed process the others' are left."""


@dataclass
class Aftermath:
    """idle_s: seconds until nothing was under way anywhere; None: that did not come about in IDLE_S, and `remains` says
    what was left. leaks: blocks held by cause, of all nodes, at the end. faults: what each process says is wrong with
    it, or why it cannot be read."""

    idle_s: float | None
    remains: dict[str, Any] = field(default_factory=dict)
    leaks: dict[str, int] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    violations: float = 0.0


async def aftermath(stage: Stage, since: float | None = None) -> Aftermath:
    """Wait until the cluster is idle, counted from `since` (monotonic seconds; None: now), and read its books."""
    began = since or time.monotonic()
    async with httpx.AsyncClient(timeout=5, trust_env=False) as client:
        remains = await _remains(stage, client)
        while remains and time.monotonic() - began < IDLE_S:
            await asyncio.sleep(0.02)
            remains = await _remains(stage, client)
        found = Aftermath(None if remains else round(time.monotonic() - began, 2), remains)
        for name in stage.roster.nodes:
            for reason, blocks in ((await _books(stage, name)).get("holds") or {}).items():
                found.leaks[reason] = found.leaks.get(reason, 0) + blocks
        for name in (*stage.roster.nodes, *ROUTERS):
            url = stage.urls.get(name) or stage.child(name).url
            try:
                health = (await client.get(f"{url}/health")).json()
                found.faults |= {name: health["fault"]} if "fault" in health else {}
                found.violations += await _metric(client, url, VIOLATIONS["router" if name in ROUTERS else "node"])
            except (httpx.HTTPError, ValueError, LookupError) as error:
                found.faults[name] = repr(error)
    return found


async def _remains(stage: Stage, client: httpx.AsyncClient) -> dict[str, Any]:
    """What is under way, by process; empty: nothing."""
    nodes, engines = stage.roster.nodes, stage.roster.engines
    names = [*nodes, *engines, *ROUTERS]
    found = await asyncio.gather(
        *(_of_node(stage, name) for name in nodes),
        *(_of_engine(stage, client, name) for name in engines),
        *(_of_router(stage, client, name) for name in ROUTERS),
    )
    return {name: what for name, what in zip(names, found, strict=True) if what}


async def _of_node(stage: Stage, name: str) -> Any:
    seen = await _books(stage, name)
    if "size" not in seen:
        return "no answer"
    left = {key: seen[key] for key in ("holds", "waiting", "transfer_holds") if seen[key]}
    if seen["available"] != seen["size"]:
        left["away"] = seen["size"] - seen["available"]
    return left


async def _books(stage: Stage, name: str) -> dict[str, Any]:
    """Empty where they cannot be had."""
    with suppress(OSError):
        return await stage.order(name, "books")
    return {}


async def _of_engine(stage: Stage, client: httpx.AsyncClient, name: str) -> Any:
    """Requests that it still runs, whoever asked for them."""
    try:
        text = (await client.get(f"{stage.child(name).command.address}/metrics")).text
        left = sum(sample(text, f"vllm:num_requests_{state}") for state in ("running", "waiting"))
    except (httpx.HTTPError, LookupError) as error:
        return repr(error)
    return {"requests": left} if left else None


async def _of_router(stage: Stage, client: httpx.AsyncClient, name: str) -> Any:
    try:
        inflight = await _metric(client, stage.urls[name], INFLIGHT)
    except (httpx.HTTPError, LookupError) as error:
        return repr(error)
    return {"inflight": inflight} if inflight else None


async def _metric(client: httpx.AsyncClient, url: str, name: str) -> float:
    return sample((await client.get(f"{url}/metrics")).text, name)


def sample(text: str, name: str) -> float:
    """Of metrics in Prometheus' format, the sum of this one's samples. Raises LookupError where there is none."""
    found = [s.value for family in text_string_to_metric_families(text) for s in family.samples if s.name == name]
    if not found:
        raise LookupError(f"no metric {name}")
    return sum(found)
