"""A cluster as a user starts it whose nodes change their roles by its load, there and back: real processes, every token
checked. In float32, so that other batches cannot change a token."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.cluster.tiny_checkpoints import VOCAB, save_checkpoint
from tests.local_cluster import LocalCluster, local_cluster
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SEATS = 4
"""Of a decode node: more streams than that want another one."""
ARGUMENTS = (
    *("--elastic", "--elastic-rest", "1", "--prefill", "2", "--decode", "1", "--max-num-seqs", str(SEATS)),
    *("--dtype", "float32", "--threads", "1", "--kv-blocks", "2000", "--served-model-name", "tiny"),
)
STEP_S, TOKEN_S = 0.01, 0.0002
"""Seconds that a step of a node lasts at least, and for each prompt token."""
CHANGE_S = 60.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    path = save_checkpoint(tmp_path_factory.mktemp("model") / "ckpt", "LlamaConfig", max_position_embeddings=4096)
    with local_cluster("--model", str(path), *ARGUMENTS, step_s=STEP_S, token_s=TOKEN_S) as cluster:
        yield cluster


def ask(cluster: LocalCluster, seed: int, prompt: int, tokens: int) -> tuple[tuple[int, ...], int]:
    """The tokens that follow a random prompt, and how many of the prompt's were reused."""
    token_ids = random.Random(seed).choices(range(3, VOCAB), k=prompt)
    answer = cluster.client.completions.create(
        model="tiny", prompt=token_ids, max_tokens=tokens, temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    made: list[int] = answer.choices[0].token_ids  # type: ignore[attr-defined]
    return tuple(made), answer.usage.prompt_tokens_details.cached_tokens or 0


@contextmanager
def asked_again_and_again(clients: int, one: Callable[[int], object]) -> Iterator[None]:
    """So many clients that each do `one` with their number, over and over. What one of them raises is raised."""
    ending = threading.Event()

    def run(client: int) -> None:
        while not ending.is_set():
            one(client)

    with ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(run, client) for client in range(clients)]
        try:
            yield
        finally:
            ending.set()
        for client in running:
            client.result(120)


def roles(cluster: LocalCluster) -> Counter[str]:
    """Of nodes that are ready."""
    return Counter(lease.role for lease in cluster.leases() if lease.state == "ready" and not lease.leaving)


def changed(cluster: LocalCluster, **wanted: int) -> None:
    wait_for(lambda: roles(cluster) == wanted, CHANGE_S, lambda: str(roles(cluster)))


def test_roles_follow_the_load_there_and_back_and_no_token_is_another(cluster: LocalCluster) -> None:
    """More streams than decode has seats make a prefill node decode. Prompts that wait make it compute them again, and
    what it decoded is in its cache still. A node that is killed has its command's role when it is back."""
    assert roles(cluster) == {"prefill": 2, "decode": 1}
    right = [ask(cluster, client, 100, 120)[0] for client in range(2 * SEATS)]

    def stream(client: int) -> None:
        assert ask(cluster, client, 100, 120)[0] == right[client]

    with asked_again_and_again(2 * SEATS, stream):
        changed(cluster, prefill=1, decode=2)
    cluster.settle()

    with asked_again_and_again(12, lambda client: ask(cluster, random.getrandbits(60), 1500, 1)):
        changed(cluster, prefill=2, decode=1)
    cluster.settle()
    again = [ask(cluster, client, 100, 120) for client in range(2 * SEATS)]
    assert [tokens for tokens, _ in again] == right
    assert all(cached >= 80 for _, cached in again), again

    (decode,) = [lease for lease in cluster.leases() if lease.role == "decode"]
    cluster.worker(decode.node_id).kill()
    wait_for(lambda: decode.epoch not in {lease.epoch for lease in cluster.leases()}, CHANGE_S)
    wait_for(lambda: sum(roles(cluster).values()) == 3, CHANGE_S, lambda: str(roles(cluster)))
    (back,) = [lease for lease in cluster.leases() if lease.node_id == decode.node_id]
    assert back.role == decode.node_id.partition("-")[0]
    assert ask(cluster, 0, 100, 120)[0] == right[0]
