"""Real decoders with drafts and without: the same tokens, anyone who runs the layers."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch

from kvferry.engine.block_pool import BlockPool
from kvferry.engine.budget import Limits
from kvferry.engine.engine import Engine, EngineConfig
from kvferry.engine.events import Generated, Stepped
from kvferry.engine.ledger import Ledger
from kvferry.engine.models.base import Model
from kvferry.engine.models.loader import load_model
from kvferry.engine.ngram_drafts import NgramDrafts
from kvferry.engine.runner import Runner
from kvferry.engine.state_memory import StateMemory, make_rows
from kvferry.engine.step_cost import StepCost
from kvferry.kernels.cpu import CpuOps, instruction_sets
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.source import resolve
from kvferry.protocol.messages import Job
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate
from tests.engine.test_recorded_hybrids import saved
from tests.engine.tiny_models import BLOCK, OURS, save_tiny, tokens_for

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
PROMPT = [int(token) for token in tokens_for(12)] * 3


def texts(engine: Engine) -> dict[str, list[int]]:
    for name, temperature in (("greedy", 0.0), ("drawn", 0.4)):
        params = SamplingParams(max_tokens=50, temperature=temperature, seed=3, ignore_eos=True)
        engine.add(Job(name, 0, tuple(PROMPT), len(PROMPT), Generate(params), "router"))
    while engine.has_work():
        assert engine.step()
    engine.check_integrity()
    made = defaultdict[str, list[int]](list)
    for event in engine.events:
        if isinstance(event, Generated):
            made[event.key[0]] += event.delta.token_ids
    return dict(made)


@pytest.mark.parametrize("impl", ["kvferry", "transformers"])
@pytest.mark.parametrize("name", ["llama3", "mistral-window", "qwen3", "smollm3-window"])
def test_tokens_with_drafts_are_those_without(name: str, impl: str, tmp_path: Path) -> None:
    save_tiny(OURS[name](), tmp_path)
    compare(load_model(resolve(str(tmp_path)), device=CPU, dtype=torch.float32, ops=ReferenceOps(), impl=impl))


@pytest.mark.parametrize("name", ["lfm2", "qwen3.5", "granite4", "minimax", "jamba", "falcon-h1"])
def test_recurrent_layers_take_wrong_drafts_back(name: str, tmp_path: Path) -> None:
    source = resolve(str(saved(name, tmp_path)))
    compare(load_model(source, device=CPU, dtype=torch.float32, ops=ReferenceOps(), impl="kvferry"))
    if instruction_sets():
        compare(load_model(source, device=CPU, dtype=torch.bfloat16, ops=CpuOps(1), impl="kvferry"))


def compare(model: Model) -> None:
    """Hold a model's tokens with right and wrong drafts to those without."""
    wanted = texts(engine_of(model, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NgramDrafts, "propose", lambda drafts, most: look(wanted, drafts, most))
        patch.setattr(StepCost, "line", lambda cost: (1.0, 0.05))
        engine = engine_of(model, 5)
        assert texts(engine) == wanted
    steps = [event for event in engine.events if isinstance(event, Stepped)]
    assert sum(step.drafted for step in steps) > sum(step.accepted for step in steps) > 20


def look(wanted: dict[str, list[int]], drafts: NgramDrafts, most: int) -> None:
    """Draft what the stream without drafts has drawn, but for every seventh token."""
    known = list(drafts._token_ids)[len(PROMPT) :]
    following = next(text[len(known) :] for text in wanted.values() if text[: len(known)] == known)[:most]
    drafts.found = tuple((token + (len(known) + i) % 7 // 6) % 90 for i, token in enumerate(following))


def engine_of(model: Model, drafts: int, blocks: int = 200) -> Engine:
    kv = torch.zeros(blocks, *model.info.layout(model.dtype, BLOCK).block_shape, dtype=model.dtype)
    floats = model.info.state_floats
    states = StateMemory(make_rows(16, floats, CPU), kv) if floats else None
    config = EngineConfig("f" * 32, BLOCK, 128, Limits(24, 12, 8), drafts=drafts, state_stride=2)
    return Engine(config, Runner(model, kv, BLOCK, states=states), BlockPool(blocks, Ledger(blocks)))
