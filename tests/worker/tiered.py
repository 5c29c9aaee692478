"""A prompt asked of a node that has a slower memory, and what the node says of that."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.engine import eviction
from kvferry.engine.engine import Engine
from kvferry.protocol.hashing import chain, root_hash
from tests.toy import FINGERPRINT, expected, make_job
from tests.worker.test_fetch_client import FULL, prompt
from tests.worker_pair import Router, Worker


def evict_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pools evict what is idle longest, also where a slow machine's pauses would teach them another order."""
    monkeypatch.setattr(eviction, "time", SimpleNamespace(monotonic=lambda: 0.0))


async def ask(router: Router, name: str, seed: int = 0, **change: Any) -> Any:
    """How much of the prompt was reused and computed; its token is right."""
    (first, *_) = await router.post_prefill(replace(make_job(name, prompt(seed), 1), **change)).ended()
    assert list(first.delta.token_ids) == expected(prompt(seed), 1)
    assert first.delta.reuse.balanced
    return first.delta.reuse


def reads(tier: str, node: Worker, outcome: str) -> float:
    return float(node.node.metrics.tiers.reads[tier][outcome]._value.get())


def count(tier: str, node: Worker, way: str) -> float:
    return float(node.node.metrics.tiers.blocks[tier][way]._value.get())


def in_pool(node: Worker, seed: int = 0) -> bool:
    """Whether any block of the prompt of this seed has not left the node's pool."""
    hashes = list(chain(root_hash(FINGERPRINT, ""), prompt(seed), 4))
    return bool(node.engine.pool.match(hashes[:FULL]))


def retract(node: Worker, blocks: int) -> None:
    """The node's engine forgets its first so many blocks, and all that depends on them."""

    def forget(engine: Engine) -> None:
        engine.pool.forget([0, *range(blocks)])
        engine.stepper.report_blocks()

    node.loaded.engine.submit(forget)


async def settle(router: Router) -> None:
    for node in (router.prefill, router.decode):
        await node.settle()
