"""Real decoders with a real draft model: the same tokens as without, anyone who runs the layers."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch

from kvferry.engine.block_pool import BlockPool
from kvferry.engine.budget import Limits
from kvferry.engine.draft_model import DraftModel
from kvferry.engine.engine import Engine, EngineConfig
from kvferry.engine.events import Generated, Stepped
from kvferry.engine.ledger import Ledger
from kvferry.engine.models.base import Model
from kvferry.engine.models.loader import load_model
from kvferry.engine.ngram_drafts import NgramDrafts
from kvferry.engine.runner import Runner
from kvferry.engine.shared_cores.core_turns import CoreTurns
from kvferry.kernels.cpu import CpuOps, instruction_sets
from kvferry.kernels.ops import Ops
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.source import resolve
from kvferry.protocol.messages import Job
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate
from tests.engine.test_draft_model import eager
from tests.engine.tiny_models import BLOCK, OURS, VOCAB, save_tiny, tokens_for

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = tuple(int(token) for token in tokens_for(21))
OUTPUT = 40


@pytest.fixture(params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "reference":
        return ReferenceOps()
    if not instruction_sets():
        pytest.skip("installed without the CPU extension")
    return CpuOps(1, batch_invariant=True)


def load(path: Path, name: str, ops: Ops) -> Model:
    path.mkdir()
    save_tiny(OURS[name](), path)
    dtype = torch.float32 if ops.name == "reference" else torch.bfloat16
    return load_model(resolve(str(path)), device=torch.device("cpu"), dtype=dtype, ops=ops)


def runner_of(model: Model) -> Runner:
    return Runner(model, torch.zeros(64, *model.info.layout(model.dtype, BLOCK).block_shape, dtype=model.dtype), BLOCK)


def texts(engine: Engine) -> dict[str, list[int]]:
    """Of requests that speculate, and of one with a penalty that does not."""
    for name, params in {
        "greedy": SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True),
        "drawn": SamplingParams(max_tokens=OUTPUT, temperature=0.8, top_p=0.9, seed=3, ignore_eos=True),
        "again": SamplingParams(max_tokens=OUTPUT // 2, temperature=0.8, seed=4, ignore_eos=True),
        "penalised": SamplingParams(max_tokens=OUTPUT, temperature=0.0, repetition_penalty=1.3, ignore_eos=True),
    }.items():
        engine.add(Job(name, 0, PROMPT, len(PROMPT), Generate(params), "router"))
    while engine.has_work():
        assert engine.step()
        engine.check_integrity()
    made = defaultdict[str, list[int]](list)
    for event in engine.events:
        if isinstance(event, Generated):
            made[event.key[0]] += event.delta.token_ids
    return dict(made)


@pytest.mark.parametrize("small", ["qwen3", "llama-tied-biased", "mistral-window"])
def test_tokens_with_a_draft_model_are_those_without(
    small: str, ops: Ops, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager(monkeypatch)
    monkeypatch.setattr(NgramDrafts, "propose", lambda self, most: setattr(self, "found", ()))
    model = load(tmp_path / "target", "qwen3", ops)
    draft = DraftModel(
        runner_of(load(tmp_path / "small", small, ops)), BlockPool(64, Ledger(64)), 12, VOCAB, CoreTurns()
    )
    found = []
    for drafts_by in (None, draft):
        config = EngineConfig("f" * 32, BLOCK, 128, Limits(24, 12, 8), drafts=4 if drafts_by else 0)
        engine = Engine(config, runner_of(model), BlockPool(64, Ledger(64)), drafts_by)
        found.append(texts(engine))
    assert found[0] == found[1]
    steps = [event for event in engine.events if isinstance(event, Stepped)]
    drafted, accepted = sum(step.drafted for step in steps), sum(step.accepted for step in steps)
    assert drafted
    assert accepted == drafted if small == "qwen3" else accepted < drafted
    assert draft.pool.available == 64
