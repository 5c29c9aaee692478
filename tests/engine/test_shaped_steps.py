"""Steps of Gemma 3n and Gemma 4: unread hidden states are not computed; engines draw transformers' tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.engine.block_pool import BlockPool
from kvferry.engine.budget import Limits
from kvferry.engine.engine import Engine, EngineConfig
from kvferry.engine.events import Generated
from kvferry.engine.ledger import Ledger
from kvferry.engine.models import load_model
from kvferry.engine.models.base import ForwardAbandoned
from kvferry.engine.models.decoder import Decoder
from kvferry.engine.runner import Runner
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.source import resolve
from tests.engine.tiny_models import BLOCK, OURS, oracle_logits, plan_of, save_tiny, tokens_for
from tests.toy import finish, make_job, tokens_of

pytestmark = pytest.mark.usefixtures("one_thread")


def load(path: Path, ops: ReferenceOps | None = None) -> Decoder:
    source, device = resolve(str(path)), torch.device("cpu")
    model = load_model(source, device=device, dtype=torch.float32, ops=ops or ReferenceOps(), impl="kvferry")
    assert isinstance(model, Decoder)
    return model


class Counted(ReferenceOps):
    """Counts the tokens that attention is computed for."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0

    def paged_attention(self, q: torch.Tensor, *how: Any, **more: Any) -> torch.Tensor:
        self.tokens += len(q)
        return super().paged_attention(q, *how, **more)


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_layers_without_k_and_v_of_their_own_compute_what_is_read_alone(name: str, tmp_path: Path) -> None:
    """Of two prompts one draws a token; that and the K/V are as if all had been computed."""
    save_tiny(OURS[name](), tmp_path)
    model = load(tmp_path, ops := Counted())
    blocks = ([5, 2, 9], [1, 7])
    plan = plan_of([(blocks[0], 0, 20), (blocks[1], 0, 11)])
    tokens, layout = torch.cat((tokens_for(20, 1), tokens_for(11, 2))), model.info.layout(torch.float32, BLOCK)
    pools = [torch.zeros(12, *layout.block_shape) for _ in range(3)]
    with torch.inference_mode():
        whole = model.forward(tokens, pools[0], plan)
        ops.tokens = 0
        read = model.forward(tokens, pools[1], replace(plan, last=(1,)))
        assert ops.tokens == 4 * 31 + 2, "four layers write K/V, two do not"
        none = model.forward(tokens, pools[2], replace(plan, last=()))
    torch.testing.assert_close(read[30], whole[30], rtol=1e-5, atol=1e-5)
    assert not none.any()
    assert torch.equal(pools[0], pools[1])
    assert torch.equal(pools[0], pools[2])


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_a_pass_suspended_in_such_a_layer_goes_on_there(name: str, tmp_path: Path) -> None:
    """Its first part computed all tokens, because those of another request were read."""
    save_tiny(OURS[name](), tmp_path)
    model, plan, tokens = load(tmp_path), plan_of([([5, 2, 9], 0, 20)]), tokens_for(20)
    pool = torch.zeros(12, *model.info.layout(torch.float32, BLOCK).block_shape)
    answers = iter([True] * 4 + [False])
    with torch.inference_mode():
        whole = model.forward(tokens, pool, plan)
        with pytest.raises(ForwardAbandoned) as raised:
            model.forward(tokens, pool, plan, lambda: next(answers))
        assert raised.value.halfway is not None
        assert raised.value.halfway.layer == 5
        rest = model.forward(tokens, pool, replace(plan, last=(0,)), halfway=raised.value.halfway)
    torch.testing.assert_close(rest[19], whole[19], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_an_engine_draws_transformers_tokens_and_scores_whole_prompts(name: str, tmp_path: Path) -> None:
    """Prompts in chunks beside streams; one whose every token is scored; all with one token of output and more."""
    save_tiny(OURS[name](), tmp_path)
    model = load(tmp_path)
    pool = torch.zeros(64, *model.info.layout(torch.float32, BLOCK).block_shape)
    config = EngineConfig("f", BLOCK, 120, Limits(24, 8, 8))
    engine = Engine(config, Runner(model, pool, BLOCK), BlockPool(64, Ledger(64)))
    prompts = {
        key: tokens_for(length, seed).tolist() for seed, (key, length) in enumerate({"a": 50, "b": 9, "c": 31}.items())
    }
    for key, prompt in prompts.items():
        engine.add(make_job(key, prompt, 6, ignore_eos=True))
    engine.add(make_job("scored", prompts["c"], 3, ignore_eos=True, prompt_logprobs=0))
    finish(engine)
    for key, prompt in (prompts | {"scored": prompts["c"]}).items():
        made = tokens_of(engine, key)
        logits = oracle_logits(tmp_path, torch.tensor([*prompt, *made]))
        assert made == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    scores = [e.delta.prompt_logprobs for e in engine.events if isinstance(e, Generated) and e.delta.prompt_logprobs]
    (found,) = scores
    wanted = oracle_logits(tmp_path, torch.tensor(prompts["c"])).log_softmax(-1)
    for position, each in enumerate(found[1:]):
        assert each is not None
        assert each.logprob == pytest.approx(float(wanted[position, prompts["c"][position + 1]]), abs=1e-3)
