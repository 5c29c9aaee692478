"""What a request with an adapter may ask for beside tokens: outputs of a grammar, forks, vectors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvferry.engine.block_pool import BlockPool
from kvferry.engine.budget import Limits
from kvferry.engine.engine import Engine, EngineConfig
from kvferry.engine.events import Generated
from kvferry.engine.grammar_masks import GrammarMasks
from kvferry.engine.ledger import Ledger
from kvferry.engine.runner import Runner
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Embed, Generate
from kvferry.structured_output.compile_threads import Inline
from tests.adapter_files import merge, save_adapter
from tests.engine.reading import finish, reading, vectors
from tests.engine.test_adapters import adapter_of, engine_of, hf, load
from tests.engine.tiny_models import BLOCK, VOCAB, family, save_tiny, tokens_for
from tests.listed_grammars import ListedCompiler, listed
from tests.toy import make_job

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = tokens_for(30).tolist()
EOS = 2


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Path, Path]:
    """A model and an adapter of it."""
    save_tiny(family("LlamaConfig", head_dim=32), tmp_path / "model")
    return tmp_path / "model", save_adapter(tmp_path / "a", hf(tmp_path / "model"))


def tokens_of(engine: Engine, name: str) -> list[int]:
    return [t for e in engine.events if isinstance(e, Generated) and e.key[0] == name for t in e.delta.token_ids]


def test_a_grammar_holds_for_what_an_adapter_draws(tiny: tuple[Path, Path]) -> None:
    """Of the outputs that it lists, that which the merged weights find likelier at the first token."""
    model = load(tiny[0])
    adapter = adapter_of(tiny[1], model)
    kv = torch.zeros(64, *model.info.layout(model.dtype, BLOCK).block_shape, dtype=model.dtype)
    masks = GrammarMasks(ListedCompiler(EOS), VOCAB, Inline(), Inline())
    engine = Engine(
        EngineConfig("f" * 32, BLOCK, 128, Limits(24, 12, 8)),
        Runner(model, kv, BLOCK, masks=masks),
        BlockPool(64, Ledger(64)),
    )
    engine.adapters.put(adapter)
    with torch.inference_mode():
        plain, merged = (
            m(input_ids=torch.tensor([PROMPT])).logits[0, -1] for m in (hf(tiny[0]), merge(hf(tiny[0]), tiny[1]))
        )
    liked, other = int((merged - plain).argmax()), int((plain - merged).argmax())
    wanted = max((liked, other), key=lambda token: float(merged[token]))
    work = Generate(SamplingParams(max_tokens=5, temperature=0.0, eos_token_ids=(EOS,)), listed([liked, 7], [other, 9]))
    engine.add(replace(make_job("a", PROMPT), work=work, adapter=adapter.id))
    finish(engine)
    assert tokens_of(engine, "a") == [wanted, 7 if wanted == liked else 9, EOS]


def test_a_fork_shares_the_blocks_of_its_adapter_and_has_its_tokens(tiny: tuple[Path, Path]) -> None:
    model = load(tiny[0])
    engine, adapter = engine_of(model), adapter_of(tiny[1], model)
    engine.adapters.put(adapter)
    engine.add(replace(make_job("first", PROMPT, 8), adapter=adapter.id))
    finish(engine)
    engine.add(replace(make_job("second", PROMPT, 8), adapter=adapter.id, fork_of="first"))
    engine.add(replace(make_job("plain", PROMPT, 8), fork_of="first"))
    finish(engine)
    assert tokens_of(engine, "second") == tokens_of(engine, "first") != tokens_of(engine, "plain")
    reuse = {e.key[0]: e.delta.reuse for e in engine.events if isinstance(e, Generated) and e.delta.reuse}
    assert (reuse["second"].computed, reuse["plain"].computed) == (1, len(PROMPT))


def test_a_vector_is_that_of_the_merged_weights(tiny: tuple[Path, Path]) -> None:
    model = load(tiny[0])
    engine, adapter = engine_of(model), adapter_of(tiny[1], model)
    engine.adapters.put(adapter)
    for name, adapter_id in (("with", adapter.id), ("without", "")):
        engine.add(replace(reading(name, PROMPT, Embed("mean")), adapter=adapter_id))
    finish(engine)
    found = {name: torch.tensor(vector) for name, vector in vectors(engine).items()}
    with torch.inference_mode():
        hidden = merge(hf(tiny[0]), tiny[1]).model(input_ids=torch.tensor([PROMPT])).last_hidden_state[0]  # type: ignore[operator, union-attr]
    torch.testing.assert_close(found["with"], hidden.mean(0) / hidden.mean(0).norm(), rtol=2e-4, atol=2e-4)
    assert (found["with"] - found["without"]).abs().max() > 0.01
