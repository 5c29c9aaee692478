"""The clients that people use, each in an environment of its own, against a cluster with nothing special.

`make test` runs the official client from the tests' own environment; `make test-clients` installs and runs them all.
"""

from __future__ import annotations

import pytest

from tests.clients.environments import CLIENTS, HERE, OUTCOMES, Client, Outcome, run
from tests.local_cluster import MODEL, LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
SCRIPTED = ("aider", "Codex", "Claude Code")
NEEDS = {"lm-eval": "reference", "aiperf": "tokenizer", **dict.fromkeys(SCRIPTED, "scripted")}
"""Fixtures whose variables a client's checks read."""


def accept(outcome: Outcome) -> None:
    OUTCOMES.append(outcome)
    if outcome.skipped:
        pytest.skip(outcome.skipped)
    assert outcome.checks
    failed = outcome.failed
    told = "\n".join(f"  {check.name}: {check.error}" for check in failed)
    assert not failed, f"{outcome.client} {outcome.version}: {len(failed)} of {len(outcome.checks)} failed\n{told}"


def test_the_official_client_of_this_environment(clients_cluster: LocalCluster) -> None:
    accept(run(HERE, clients_cluster.url, MODEL))


@pytest.mark.clients
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name.replace(" ", "-"))
def test_client(client: Client, clients_cluster: LocalCluster, request: pytest.FixtureRequest) -> None:
    more = request.getfixturevalue(NEEDS[client.name]) if client.name in NEEDS else None
    accept(run(client, clients_cluster.url, MODEL, more))
