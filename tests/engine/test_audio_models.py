"""Prompts with audio on our own decoder and encoders, against transformers' whole models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.engine.models.decoder import Decoder
from kvferry.kernels.cpu import CpuOps
from kvferry.kernels.ops import Ops
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.memory_needs import model_needs
from kvferry.model_files.source import resolve
from tests.engine.media_cache import OPS, MediaCache, chunks_of, loaded
from tests.engine.tiny_audio import FAMILIES, chat, clip, expansion, oracle, save, tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

LONG, SHORT, WHOLE = clip(0.77, 1), clip(0.3011, 2), clip(1.0, 3)
QUESTIONS: dict[str, Sequence[str | np.ndarray]] = {
    "first and last": (LONG, "Who speaks, and where?", SHORT),
    "between": ("Listen: ", SHORT, " and ", WHOLE, " differ. How?"),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    path = tmp_path_factory.mktemp(request.param)
    return request.param, path, save(request.param, path)


@pytest.mark.parametrize("ops", OPS)
def test_logits_equal_the_whole_models(family: tuple[str, Path, Any], ops: type[Ops]) -> None:
    """In one chunk, and in chunks that end inside clips."""
    name, path, whole = family
    model, encoder = loaded(path, ops)
    for content in QUESTIONS.values():
        prompt = encoder.render(chat(content))
        tokens = torch.tensor(prompt.token_ids)
        answer = torch.randint(0, 90, (4,), generator=torch.Generator().manual_seed(1))
        wanted = oracle(name, whole, content, torch.cat((tokens, answer)))
        assert wanted.std() > 0.1
        for longest in (1000, 17):
            cache = MediaCache(model, encoder, {"a": prompt})
            parts = [cache.step({"a": each})[0] for each in tokens.split(chunks_of(prompt, longest, False))]
            parts += [cache.step({"a": each})[0] for each in answer.split(1)]
            torch.testing.assert_close(torch.cat(parts), wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("seconds", [0.0201, 0.03, 0.05, 0.061, 0.4999, 0.98, 0.995, 1.0])
def test_rows_of_clips_of_any_length(family: tuple[str, Path, Any], seconds: float) -> None:
    """Also where the tower's convolutions reach behind the clip, and at the window's end."""
    name, path, whole = family
    model, encoder = loaded(path, OPS[-1])
    content = ("Say: ", clip(seconds, 5))
    prompt = encoder.render(chat(content))
    tokens = torch.tensor(prompt.token_ids)
    got = MediaCache(model, encoder, {"a": prompt}).step({"a": tokens})[0]
    torch.testing.assert_close(got, oracle(name, whole, content, tokens), rtol=2e-4, atol=2e-4)


def test_prompts_are_those_of_transformers_processors(family: tuple[str, Path, Any]) -> None:
    name, path, _ = family
    _, encoder = loaded(path, ReferenceOps)
    own = FAMILIES[name]()
    for samples in (LONG, SHORT, WHOLE):
        prompt = encoder.render(chat(("One ", samples, " two")))
        shown = own.shown.replace(own.token, expansion(name, samples))
        assert list(prompt.token_ids) == tokenizer().encode(f"user: One {shown} two\nassistant: ").ids
        (item,) = prompt.media
        assert prompt.sound
        assert (item.modality, encoder.modalities) == ("audio", {"audio"})
    assert encoder.rope_positions(prompt.token_ids, prompt.media) is None


def test_what_a_node_needs_includes_the_tower(family: tuple[str, Path, Any]) -> None:
    _, path, whole = family
    text = ("language_model", "lm_head")
    tower = sum(p.numel() for name, p in whole.named_parameters() if not set(text) & set(name.split(".")))
    needs = model_needs(resolve(str(path)))
    assert needs.tower == tower > 0
    assert needs.memory(2) == 2 * needs.parameters


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_is_as_near_to_float32_as_transformers_is(name: str, tmp_path: Path) -> None:
    whole = save(name, tmp_path)
    model, encoder = loaded(tmp_path, OPS[-1], torch.bfloat16)
    content = QUESTIONS["between"]
    prompt = encoder.render(chat(content))
    tokens = torch.tensor((*prompt.token_ids, 5, 17, 3))
    wanted = oracle(name, whole, content, tokens)
    theirs = oracle(name, whole.bfloat16(), content, tokens)
    cache = MediaCache(model, encoder, {"a": prompt})
    got = torch.cat([cache.step({"a": each})[0] for each in tokens.split([len(prompt.token_ids), 1, 1, 1])])
    assert isinstance(model, Decoder)
    assert (model._step is not None) == (OPS[-1] is CpuOps)
    ours, their = (float((each.float() - wanted).square().mean().sqrt()) for each in (got, theirs))
    assert ours < 1.5 * their, f"{ours:.4f} against {their:.4f}"
