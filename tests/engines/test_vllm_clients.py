"""Clients against vLLM's own server and against a router with that server behind it: what passes there passes here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.clients.environments import CLIENTS, HERE, OUTCOMES, Client, Outcome, run
from tests.engine_adapter.fleet import SERVED, Fleet, fleet
from tests.engines.vllm_fleet import START_S, add_vllm, kill, model_directory

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]
OPTIONS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--max-model-len", "4096")
PATIENCE = {"CHECK_SECONDS": "240"}
"""A core computes some 20 tokens a second of a stream, and a check has up to 2,000."""
OWN = ("openai", "anthropic")
"""Clients of APIs that vLLM's server has itself."""


@pytest.fixture(scope="module")
def running() -> Iterator[Fleet]:
    model = model_directory()
    with fleet() as made:
        try:
            add_vllm(made, 0, model, *OPTIONS)
            made.start_router(str(model))
            made.ready(1, START_S)
            yield made
        finally:
            for engine in made.engines:
                kill(engine)


@pytest.mark.parametrize("client", [HERE, *(client for client in CLIENTS if client.name in OWN[1:])], ids=OWN)
def test_what_passes_at_vllm_passes_behind_the_router(running: Fleet, client: Client) -> None:
    client = replace(client, seconds=3000)
    own = kept(run(client, running.engines[0].url, SERVED, PATIENCE), "vLLM alone")
    behind = kept(run(client, running.router_url, SERVED, PATIENCE), "router, vLLM")
    passed = {check.name for check in own.checks if check.ok}
    told = {check.name: check.error for check in behind.failed}
    assert passed, [check.error for check in own.checks][:3]
    assert not {name: error for name, error in told.items() if name in passed}
    print(f"both fail: {sorted(told)}; vLLM alone: {sorted({check.name for check in own.failed} - told.keys())}")


def kept(outcome: Outcome, where: str) -> Outcome:
    """The outcome, named after its server in the table at the end."""
    if outcome.skipped:
        pytest.skip(outcome.skipped)
    outcome.client = f"{outcome.client} ({where})"
    OUTCOMES.append(outcome)
    return outcome
