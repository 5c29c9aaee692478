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
from kvferry.engine.models.loader import load_model
from kvferry.engine.runner import Runner
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.source import resolve
from kvferry.protocol.messages import Job
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate
from tests.engine.tiny_models import BLOCK, OURS, save_tiny, tokens_for

pytestmark = pytest.mark.usefixtures("one_thread")
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
    cpu = torch.device("cpu")
    model = load_model(resolve(str(tmp_path)), device=cpu, dtype=torch.float32, ops=ReferenceOps(), impl=impl)
    found = []
    for drafts in (0, 5):
        kv = torch.zeros(64, *model.info.layout(model.dtype, BLOCK).block_shape)
        config = EngineConfig("f" * 32, BLOCK, 128, Limits(24, 12, 8), drafts=drafts)
        engine = Engine(config, Runner(model, kv, BLOCK), BlockPool(64, Ledger(64)))
        found.append(texts(engine))
    assert found[0] == found[1]
    assert sum(event.drafted for event in engine.events if isinstance(event, Stepped)) > 0
