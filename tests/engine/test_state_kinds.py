"""A model of each kind of recurrent state: a ship, a move, a kill, a tier and a fork change no token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvferry.engine import migration
from kvferry.engine.engine import Engine
from kvferry.engine.models import load_model
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.source import resolve
from kvferry.protocol.messages import Job
from tests.engine.carrying import BUDDY, Ship, begin, copy, granted, move_over
from tests.engine.test_state_models import engine_of
from tests.engine.tiny_hybrids import HYBRIDS
from tests.engine.tiny_models import save_tiny, tokens_for
from tests.toy import finish, make_job, runner_of, tokens_of

KINDS = {
    "short convolution": "lfm2",
    "gated delta rule": "qwen3.5",
    "Mamba 2": "granite4-rope",
    "Mamba 2 beside attention": "falcon-h1",
    "Mamba 2 in layers of their own": "nemotron-3",
    "Mamba 1": "jamba",
    "lightning attention": "minimax",
}
PROMPT = tokens_for(43, 9).tolist()
COUNT = 30
MakeEngine = Callable[[], Engine]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=KINDS.values(), ids=list(KINDS))
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MakeEngine:
    path: Path = tmp_path_factory.mktemp("models")
    save_tiny(HYBRIDS[request.param](), path)
    cpu = torch.device("cpu")
    model = load_model(resolve(str(path)), device=cpu, dtype=torch.float32, ops=ReferenceOps(), impl="kvferry")
    return lambda: engine_of(model)


@pytest.fixture(scope="module")
def wanted(make: MakeEngine) -> list[int]:
    return undisturbed(make, PROMPT, COUNT)


def undisturbed(make: MakeEngine, prompt: list[int], count: int) -> list[int]:
    engine = make()
    engine.add(make_job("a", prompt, count))
    finish(engine)
    found: list[int] = tokens_of(engine, "a")
    assert len(set(found)) > 2
    return found


def running(engine: Engine, job: Job, count: int) -> Engine:
    """Return the engine once the job's stream has so many tokens."""
    engine.add(job)
    while len(tokens_of(engine, "a")) < count:
        engine.step()
    return engine


def test_a_ship(make: MakeEngine, wanted: list[int]) -> None:
    prefill, decode = make(), make()
    Ship(prefill, decode, make_job("a", PROMPT, COUNT)).land()
    for engine in (decode, prefill):
        finish(engine)
    assert tokens_of(prefill, "a") + tokens_of(decode, "a") == wanted


def test_a_move(make: MakeEngine, wanted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "AHEAD", 6)
    source, target = running(make(), make_job("a", PROMPT, COUNT), 7), make()
    move = begin(source)
    grant = granted(target, move.job)
    for _ in range(3):
        source.step()
    stand = source.moving.snapshot(move.transfer)
    assert stand is not None
    move_over(source, move, target, grant, stand)
    for engine in (source, target):
        finish(engine)
    assert tokens_of(source, "a") + tokens_of(target, "a") == wanted


def test_a_kill_after_a_copy(make: MakeEngine) -> None:
    """Only what was generated is copied, so the prompt is short and the stream long."""
    prompt, count = PROMPT[:13], 100
    source, buddy = running(make(), replace(make_job("a", prompt, count), buddy=BUDDY), 90), make()
    assert copy(source, buddy) > 0
    assert buddy.states is not None
    known = [*prompt, *tokens_of(source, "a")]
    buddy.add(replace(make_job("a", known, count, attempt=1), prompt_len=len(prompt)))
    finish(buddy)
    assert buddy.states.loaded_total == 1
    assert tokens_of(source, "a") + tokens_of(buddy, "a") == undisturbed(make, prompt, count)


def test_blocks_of_a_tier_or_another_node(make: MakeEngine, wanted: list[int]) -> None:
    holder, asker = running(make(), make_job("a", PROMPT, COUNT), COUNT), make()
    hashes = asker._request(make_job("b", PROMPT)).hashes
    block_ids, _ = holder.prefixes.chain(hashes)
    names = asker.prefixes.supplied(hashes, len(block_ids))
    first, ours = asker.copies.reserve("supply", names, len(names))
    for theirs, own in zip(block_ids[first:], ours, strict=True):
        runner_of(asker).kv[own] = runner_of(holder).kv[theirs]
    asker.copies.land("supply")
    asker.add(make_job("a", PROMPT, COUNT))
    finish(asker)
    assert asker.states is not None
    assert asker.states.loaded_total == 1
    assert tokens_of(asker, "a") == wanted


def test_a_fork_and_a_preemption(make: MakeEngine, wanted: list[int]) -> None:
    engine = make()
    engine.add(make_job("a", PROMPT, COUNT))
    engine.add(replace(make_job("f", PROMPT, COUNT), fork_of="a"))
    while len(tokens_of(engine, "f")) < 5:
        engine.step()
    engine.scheduler.preempt(engine.request_table.running[-1])
    finish(engine)
    assert tokens_of(engine, "a") == tokens_of(engine, "f") == wanted
