"""The clients that people use, each in an environment of its own, against a cluster with nothing special.

`make test` runs the official client from the tests' own environment; `make test-clients` installs and runs them all.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.servers import free_port
from tests.clients.environments import CLIENTS, HERE, OUTCOMES, Client, Outcome, run
from tests.local_cluster import MODEL, LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
SCRIPTED = ("aider", "Codex", "Claude Code")
SEEING = ("openai", "openai node", "AI SDK", "LangChain", "anthropic")
RETRYING = {"openai": "openai_retries.py", "openai node": "openai_node_retries.mjs"}
"""Clients and their files of checks whose router is killed."""
NEEDS = {
    "lm-eval": "reference", "aiperf": "tokenizer", **dict.fromkeys(SCRIPTED, "scripted"),
    **dict.fromkeys(SEEING, "seeing"),
}  # fmt: skip
"""Fixtures whose variables a client's checks read."""


def accept(outcome: Outcome) -> None:
    OUTCOMES.append(outcome)
    if outcome.skipped:
        pytest.skip(outcome.skipped)
    assert outcome.checks
    failed = outcome.failed
    told = "\n".join(f"  {check.name}: {check.error}" for check in failed)
    assert not failed, f"{outcome.client} {outcome.version}: {len(failed)} of {len(outcome.checks)} failed\n{told}"


def test_the_official_client_of_this_environment(clients_cluster: LocalCluster, seeing: dict[str, str]) -> None:
    accept(run(HERE, clients_cluster.url, MODEL, seeing))


def with_own_nodes(client: Client, media: dict[str, str]) -> Outcome:
    """Run a client's checks of media alone; their URL is in the variables."""
    files = tuple(name for name in client.files if Path(name).stem.endswith("_media"))
    outcome = run(replace(client, files=files), media["CHECK_SEEING_URL"], MODEL, media)
    outcome.client += ", own nodes"
    return outcome


def test_the_official_client_sees_and_hears_with_own_nodes(own_media: dict[str, str]) -> None:
    accept(with_own_nodes(HERE, own_media))


@pytest.mark.clients
@pytest.mark.parametrize("name", SEEING)
def test_images_and_speech_with_own_nodes(name: str, own_media: dict[str, str]) -> None:
    (client,) = (client for client in CLIENTS if client.name == name)
    accept(with_own_nodes(client, own_media))


@pytest.mark.clients
@pytest.mark.parametrize(("name", "file"), RETRYING.items(), ids=lambda value: value.replace(" ", "-"))
def test_requests_go_on_when_their_router_is_killed(name: str, file: str, dying: dict[str, str]) -> None:
    (client,) = (client for client in CLIENTS if client.name == name)
    outcome = run(replace(client, files=(file,), seconds=900), dying["CHECK_DYING_URL"], MODEL, dying)
    outcome.client += ", dying router"
    accept(outcome)


@pytest.mark.clients
@pytest.mark.skipif("KVFERRY_TEST_OPEN_WEBUI" not in os.environ, reason="installs 5 GB; KVFERRY_TEST_OPEN_WEBUI=1")
def test_open_webui(scripted: dict[str, str], seeing: dict[str, str]) -> None:
    client = Client("Open WebUI", "python", ("open-webui>=0.6",), ("open_webui_checks.py",), seconds=900)
    more = {**scripted, **seeing, "CHECK_FREE_PORT": str(free_port()), "CHECK_SECONDS": "160"}
    accept(run(client, scripted["CHECK_SCRIPTED_URL"], MODEL, more))


@pytest.mark.clients
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name.replace(" ", "-"))
def test_client(client: Client, clients_cluster: LocalCluster, request: pytest.FixtureRequest) -> None:
    more = request.getfixturevalue(NEEDS[client.name]) if client.name in NEEDS else None
    accept(run(client, clients_cluster.url, MODEL, more))
