"""Hybrid models and mixtures with `--batch-invariant`: the same bits for a token in every batch and division."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvferry.kernels.cpu import CpuOps, instruction_sets
from kvferry.kernels.expert_routing import logistic
from kvferry.protocol.errors import ConfigError
from kvferry.worker.batch_invariance import require_batch_invariance
from tests.engine.test_models_cpu import load
from tests.engine.tiny_hybrids import HYBRIDS
from tests.engine.tiny_models import OURS, Cache, chunked_logits, save_tiny, tokens_for

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not instruction_sets(), reason="installed without the CPU extension"),
]
PRECISE = "routers of experts do not compute in float32"
REFUSED = {
    "minimax": "other than lightning attention",
    "jamba": "an even input width of every dense layer",
    "nemotron-3": PRECISE,
    "nemotron-3-super": PRECISE,
    "nemotron-3-super-biased": PRECISE,
    "glm4-moe": PRECISE,
    "minimax-m2": PRECISE,
}


def save(name: str, path: Path) -> None:
    config = (HYBRIDS | OURS)[name]()
    config.head_dim = 32
    save_tiny(config, path)


@pytest.mark.parametrize("name", [name for name in HYBRIDS if name not in REFUSED])
def test_a_token_has_the_same_bits_in_every_batch(name: str, tmp_path: Path) -> None:
    """Of a prompt in one chunk, in several, in steps of one token beside other sequences; with two threads."""
    save(name, tmp_path)
    tokens, others = tokens_for(70, 1), tokens_for(70, 2)
    whole = chunked_logits(load(tmp_path, CpuOps(1, batch_invariant=True), torch.bfloat16), tokens, [70])
    model = load(tmp_path, CpuOps(2, batch_invariant=True), torch.bfloat16)
    require_batch_invariance(model)
    for division in ([7, 1, 20, 42], [1, 2, 3, 4, 5, 33, 22], [32, 32, 6]):
        assert torch.equal(chunked_logits(model, tokens, division), whole), division
    cache = Cache(model)
    got = [cache.step({"a": tokens[:30], "b": others[:3]})[0]]
    got += [
        cache.step({"a": tokens[i : i + 1], "b": others[i - 27 : i - 26], "c": others[:5]})[0] for i in range(30, 70)
    ]
    assert torch.equal(torch.cat(got), whole)


@pytest.mark.parametrize("name", ["qwen2-moe", "llama4-whole"])
def test_weights_of_experts_have_the_same_bits_at_any_place(name: str, tmp_path: Path) -> None:
    """Sigmoids of a router or a shared expert had others at the end of a batch."""
    save(name, tmp_path)
    tokens = tokens_for(70, 1)
    model = load(tmp_path, CpuOps(2, batch_invariant=True), torch.bfloat16)
    require_batch_invariance(model)
    whole = chunked_logits(model, tokens, [70])
    assert torch.equal(chunked_logits(model, tokens, [1] * 70), whole)
    assert torch.equal(chunked_logits(model, tokens, [23, 47]), whole)


@pytest.mark.parametrize("shape", [(1, 1), (70, 1), (3, 7), (40, 6), (600, 130)])
def test_a_sigmoid_depends_on_its_number_alone(shape: tuple[int, int]) -> None:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(4)) * 3
    found = logistic(x)
    torch.testing.assert_close(found, x.sigmoid())
    assert torch.equal(found, torch.cat([logistic(row[None]) for row in x]))
    assert torch.equal(found.flatten()[-50:], torch.cat([logistic(one[None]) for one in x.flatten()[-50:]]))


@pytest.mark.parametrize(("name", "words"), REFUSED.items())
def test_what_cannot_be_invariant_is_refused(name: str, words: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    with pytest.raises(ConfigError, match=words):
        require_batch_invariance(load(tmp_path, CpuOps(1, batch_invariant=True), torch.bfloat16))
