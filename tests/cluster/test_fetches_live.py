"""Two real processes with a random model: what the one holds the other fetches, and it computes the same; a holder that
freezes or dies in the middle costs nobody a token, and nothing is left of it."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from benchmarks.fetching import Node, PromptClient, nodes
from kvferry.protocol.messages import Holder, TokenDelta
from kvferry.worker.block_fetches import BACKOFF_S
from tests.cluster.tiny_checkpoints import VOCAB, save_checkpoint
from tests.local_cluster import idle, scrape, value
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS, BLOCK = 1900, 16
OPTIONS = ("--dtype", "float32", "--kv-blocks", "600", "--threads", "1")
Running = tuple[PromptClient, Node, Node]
"""A client, the node that asks and the one that holds."""
SEEDS = itertools.count()
"""Of prompts that no node has computed, also when a test is tried again."""


@contextmanager
def running_in(folder: Path) -> Iterator[Running]:
    path: Path = save_checkpoint(folder / "ckpt", "LlamaConfig", max_position_embeddings=2048)
    with nodes(str(path), folder, *OPTIONS) as (asks, holds), httpx.Client(trust_env=False, timeout=60) as client:
        yield PromptClient(client, VOCAB), asks, holds


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[ExitStack, list[Running]]]:
    with ExitStack() as stack:
        yield stack, []


@pytest.fixture
def running(started: tuple[ExitStack, list[Running]], tmp_path_factory: pytest.TempPathFactory) -> Running:
    """The pair of this file, or another where its holder was killed."""
    stack, pairs = started
    if not pairs or pairs[-1][2].process.poll() is not None:
        pairs.append(stack.enter_context(running_in(tmp_path_factory.mktemp("fetching"))))
    return pairs[-1]


def fetch(running: Running) -> tuple[TokenDelta, TokenDelta]:
    """Computed at the one, then asked of the other: both of their answers."""
    (asked, asks, holds), seed = running, next(SEEDS)
    _, there = asked.first(holds, TOKENS, seed)
    _, here = asked.first(asks, TOKENS, seed, Holder(holds.lease.target, TOKENS // BLOCK))
    assert here.token_ids == there.token_ids
    assert here.reuse is not None
    assert here.reuse.balanced
    return here, there


def settled(*running: Node) -> None:
    for node in running:
        wait_for(lambda node=node: idle(scrape(node.lease.http_url)), 20)  # type: ignore[misc]


def test_what_the_one_holds_the_other_fetches_and_computes_the_same(running: Running) -> None:
    before = value(scrape(running[1].lease.http_url), "kvferry_fetch_blocks_total", way="fetched")
    here, there = fetch(running)
    assert there.reuse is not None
    assert (there.reuse.fetched, there.reuse.computed) == (0, TOKENS)
    assert here.reuse is not None
    if here.reuse.fetched == 0:  # late, on a machine where others want the cores
        time.sleep(BACKOFF_S)
        here, _ = fetch(running)
        assert here.reuse is not None
    assert (here.reuse.fetched, here.reuse.computed) == (TOKENS // BLOCK * BLOCK, TOKENS % BLOCK)
    settled(*running[1:])
    samples = scrape(running[1].lease.http_url)
    assert value(samples, "kvferry_fetch_blocks_total", way="fetched") == before + TOKENS // BLOCK
    assert value(samples, "kvferry_account_violations_total") == 0


@pytest.mark.parametrize("after_s", [0.0, 0.01])
def test_a_holder_that_freezes_in_the_middle_costs_the_computing_alone(running: Running, after_s: float) -> None:
    (asked, asks, holds), seed = running, next(SEEDS)
    _, there = asked.first(holds, TOKENS, seed)
    stop = threading.Timer(after_s, holds.process.send_signal, (signal.SIGSTOP,))
    stop.start()
    try:
        _, here = asked.first(asks, TOKENS, seed, Holder(holds.lease.target, TOKENS // BLOCK))
    finally:
        stop.join()
        holds.process.send_signal(signal.SIGCONT)
    assert here.token_ids == there.token_ids
    assert here.reuse is not None
    assert here.reuse.balanced
    settled(asks, holds)
    time.sleep(BACKOFF_S)


def test_a_holder_that_is_killed_in_the_middle_costs_the_computing_alone(running: Running) -> None:
    (asked, asks, holds), seed = running, next(SEEDS)
    _, there = asked.first(holds, TOKENS, seed)
    holds.process.send_signal(signal.SIGSTOP)
    kill = threading.Timer(0.3, holds.process.kill)
    kill.start()
    _, here = asked.first(asks, TOKENS, seed, Holder(holds.lease.target, TOKENS // BLOCK))
    kill.join()
    assert here.token_ids == there.token_ids
    assert here.reuse is not None
    assert (here.reuse.fetched, here.reuse.computed) == (0, TOKENS)
    settled(asks)
    assert value(scrape(asks.lease.http_url), "kvferry_fetches_total", outcome="cancelled") == 0
