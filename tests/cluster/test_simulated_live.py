"""A simulation with the rates of a real cluster tells the times to first token that this has, within 20 %.

The machine that runs the tests is seldom quiet: what counts is the medians over some rounds, of those in which its
speed stayed about the same; the figures are printed (`pytest -s`). KVFERRY_TEST_SIMULATED=8 (`make test-simulated`)
has so many, of the demo model. The short form has two or three of a tiny model at a set pace, whose rates the probe
must find, and medians that may be 30 % off.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from benchmarks.load import Target
from benchmarks.simulated import KINDS, Round, played, table
from tests.cluster.tiny_checkpoints import VOCAB, save_checkpoint
from tests.local_cluster import MODEL, LocalCluster, local_cluster

BUSY, SHORT = 0.4, 3
ROUNDS = int(os.environ.get("KVFERRY_TEST_SIMULATED", SHORT))
LEAST_ROUNDS, REQUESTS, NEAR = (3, 20, 1.2) if ROUNDS > SHORT else (2, 12, 1.3)
STEP_S, TOKEN_S = 0.005, 0.0003
"""Seconds that a step of a node lasts at least in the short form, and for each prompt token."""
STEADY, ENOUGH_S = 1.15, 50 * ROUNDS
"""Times that a simulated figure may be off, and that the machine may have become faster or slower in a round; and after
so many seconds no further round begins."""


def far(rounds: Sequence[Round]) -> dict[str, float]:
    """The figures that are off, by the medians over all rounds."""
    ratios = {kind: statistics.median(each.ratio(kind) for each in rounds) for kind in KINDS}
    return {kind: ratio for kind, ratio in ratios.items() if not 1 / NEAR <= ratio <= NEAR}


async def steady_rounds(cluster: LocalCluster) -> list[Round]:
    """As many as it takes to come near, else all that there is time for."""
    found: list[Round] = []
    began = time.monotonic()
    async for each in played(Target(cluster.url, MODEL), cluster.redis_url, ROUNDS, REQUESTS, BUSY):
        if each.drift() <= STEADY:
            found.append(each)
        near = len(found) >= LEAST_ROUNDS and not far(found)
        if near or time.monotonic() - began > ENOUGH_S:
            break
    return found


def paced_model(path: Path) -> Path:
    """A tiny model that reads the tokens of any prompt, and answers with those that each are a text: clients hear of
    parts of a character when it is whole."""
    save_checkpoint(path, "LlamaConfig", vocab_size=49_152, max_position_embeddings=2048)
    (file,) = path.glob("*.safetensors")
    weights, words = load_file(file), Tokenizer.from_file(str(path / "tokenizer.json"))
    texts = [number for number in range(VOCAB) if (word := words.decode([number])) and word.isascii()]
    said = 100 * weights["lm_head.weight"][texts]  # drawn, though the others are many
    weights["lm_head.weight"].zero_()[texts] = said
    save_file(weights, file, {"format": "pt"})
    return path


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_simulation_tells_what_a_cluster_does(tmp_path: Path) -> None:
    model: tuple[str, ...] = ()
    pace = (0.0, 0.0)
    if ROUNDS <= SHORT:
        model = ("--model", str(paced_model(tmp_path / "model")), "--served-model-name", MODEL, "--threads", "1")
        pace = (STEP_S, TOKEN_S)
    with local_cluster("--prefill", "1", "--decode", "1", *model, step_s=pace[0], token_s=pace[1]) as cluster:
        rounds = asyncio.run(steady_rounds(cluster))
    if len(rounds) < LEAST_ROUNDS:
        pytest.skip(f"the machine kept its speed in {len(rounds)} rounds only")
    print(table(rounds))
    assert not far(rounds)
