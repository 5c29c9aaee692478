"""Prompts with images on our own decoder and encoders, against transformers' whole models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from kvferry.engine.models.base import ForwardAbandoned
from kvferry.engine.models.decoder import Decoder
from kvferry.kernels.cpu import CpuOps
from kvferry.kernels.decoder_step import always
from kvferry.kernels.ops import Ops
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.memory_needs import model_needs
from kvferry.model_files.source import resolve
from kvferry.protocol.errors import InvalidRequest
from tests.engine.joined_ranks import joined_ranks
from tests.engine.media_cache import OPS, MediaCache, chunks_of, loaded
from tests.engine.tiny_vision import FAMILIES, chat, expansion, oracle, picture, save, tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

WIDE, TALL, SMALL = picture(60, 31, 1), picture(25, 52, 2), picture(20, 20, 3)
QUESTIONS: dict[str, Sequence[str | Image.Image]] = {
    "first and last": (WIDE, "How many ferries do you see, and where?", TALL),
    "between": ("Look: ", SMALL, " and ", WIDE, " differ. How?"),
}
Saved = tuple[Path, Any]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    path = tmp_path_factory.mktemp(request.param)
    return request.param, path, save(request.param, path)


def images_of(content: Sequence[str | Image.Image]) -> list[Image.Image]:
    return [each for each in content if not isinstance(each, str)]


@pytest.mark.parametrize("ops", OPS)
def test_logits_equal_the_whole_models(family: tuple[str, Path, Any], ops: type[Ops]) -> None:
    name, path, whole = family
    model, encoder = loaded(path, ops)
    for content in QUESTIONS.values():
        prompt = encoder.render(chat(content))
        tokens = torch.tensor(prompt.token_ids)
        answer = torch.randint(0, 90, (4,), generator=torch.Generator().manual_seed(1))
        wanted = oracle(name, whole, images_of(content), torch.cat((tokens, answer)))
        assert wanted.std() > 0.1
        for longest in (1000, 23):
            cache = MediaCache(model, encoder, {"a": prompt})
            chunks = chunks_of(prompt, longest, encoder.bidirectional)
            parts = [cache.step({"a": each})[0] for each in (*tokens.split(chunks), *answer.split(1))]
            torch.testing.assert_close(torch.cat(parts), wanted, rtol=2e-4, atol=2e-4)


def test_images_beside_text_alone(family: tuple[str, Path, Any]) -> None:
    """A sequence decodes behind its image, another one is text, a third one's image is computed beside them."""
    name, path, whole = family
    model, encoder = loaded(path, OPS[-1])
    contents = {"a": ("Is it", SMALL), "b": ("Only words.",), "c": (TALL, "Where?")}
    prompts = {key: encoder.render(chat(content)) for key, content in contents.items()}
    tokens = {key: torch.tensor(prompt.token_ids) for key, prompt in prompts.items()}
    cache = MediaCache(model, encoder, prompts)
    later = torch.tensor([5, 17])
    found = [dict(zip("ab", cache.step({key: tokens[key] for key in "ab"}), strict=True))]
    found.append(dict(zip("abc", cache.step({"a": later[:1], "b": later[:1], "c": tokens["c"]}), strict=True)))
    found.append(dict(zip("abc", cache.step(dict.fromkeys("abc", later[1:])), strict=True)))
    for key, content in contents.items():
        added = later if key != "c" else later[1:]
        wanted = oracle(name, whole, images_of(content), torch.cat((tokens[key], added)))
        got = torch.cat([step[key] for step in found if key in step])
        torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4)


def test_prompts_are_those_of_transformers_processors(family: tuple[str, Path, Any]) -> None:
    name, path, _ = family
    _, encoder = loaded(path, ReferenceOps)
    written = FAMILIES[name]().image
    for image in (WIDE, TALL, SMALL):
        prompt = encoder.render(chat(("One ", image, " two")))
        shown = expansion(name, image)
        if name.startswith("qwen"):
            shown = written.replace("<|image_pad|>", shown)
        wanted = tokenizer().encode(f"user: One {shown} two\nassistant: ").ids
        assert list(prompt.token_ids) == wanted
        (item,) = prompt.media
        assert prompt.sound
        assert item.modality == "image"


def test_a_picture_that_a_family_cannot_resize(family: tuple[str, Path, Any]) -> None:
    name, path, _ = family
    thin = chat((picture(402, 2),))
    if name.startswith(("qwen", "mistral")):
        with pytest.raises(InvalidRequest, match=r"content\[0\]: the model takes no image of 402 x 2 pixels"):
            loaded(path, ReferenceOps)[1].render(thin)
    else:
        assert loaded(path, ReferenceOps)[1].render(thin).sound


def test_what_a_node_needs_includes_the_tower(family: tuple[str, Path, Any]) -> None:
    _, path, whole = family
    text = ("language_model", "text_model", "lm_head")
    tower = sum(p.numel() for name, p in whole.named_parameters() if not set(text) & set(name.split(".")))
    needs = model_needs(resolve(str(path)))
    assert needs.tower == tower > 0
    assert needs.memory(2) == 2 * needs.parameters


def test_a_pass_that_is_suspended_between_levels(tmp_path: Path) -> None:
    """Rows that are added behind the first two layers are added once."""
    whole = save("qwen3_vl", tmp_path)
    model, encoder = loaded(tmp_path, OPS[-1])
    prompt = encoder.render(chat((SMALL, "What?")))
    tokens = torch.tensor(prompt.token_ids)
    cache = MediaCache(model, encoder, {"a": prompt})
    halfway = None
    for layer in (1, 2):
        asked = iter([True] * (layer - 1 if halfway is None else 0) + [False])
        with pytest.raises(ForwardAbandoned) as stopped:
            cache.step({"a": tokens}, lambda answers=asked: next(answers), halfway)
        halfway = stopped.value.halfway
        assert halfway is not None
        assert halfway.layer == layer
        cache.computed["a"] = 0
    got = cache.step({"a": tokens}, always, halfway)[0]
    torch.testing.assert_close(got, oracle("qwen3_vl", whole, [SMALL], tokens), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_is_as_near_to_float32_as_transformers_is(name: str, tmp_path: Path) -> None:
    """Chunks and decode steps through the compiled kernels, the recorded step included where a family has one."""
    recorded = name not in ("gemma3", "qwen3_vl_moe", "qwen3_5_moe") and OPS[-1] is CpuOps
    whole = save(name, tmp_path)
    model, encoder = loaded(tmp_path, OPS[-1], torch.bfloat16)
    content = QUESTIONS["between"]
    prompt = encoder.render(chat(content))
    tokens = torch.tensor((*prompt.token_ids, 5, 17, 3))
    wanted = oracle(name, whole, images_of(content), tokens)
    theirs = oracle(name, whole.bfloat16(), images_of(content), tokens)
    cache = MediaCache(model, encoder, {"a": prompt})
    chunks = [len(prompt.token_ids), 1, 1, 1]
    got = torch.cat([cache.step({"a": each})[0] for each in tokens.split(chunks)])
    assert isinstance(model, Decoder)
    assert (model._step is not None) == recorded
    cache.computed["a"], model._step = len(tokens) - 1, None
    cache.rows = {name: (before, after) for name, (after, before) in cache.rows.items()}
    assert torch.equal(cache.step({"a": tokens[-1:]})[0], got[-1:]), "the recorded step and the layers one by one"
    ours, their = (float((each.float() - wanted).square().mean().sqrt()) for each in (got, theirs))
    assert ours < 1.5 * their, f"{ours:.4f} against {their:.4f}"


def test_two_ranks(tmp_path: Path) -> None:
    whole = save("qwen3_vl", tmp_path)
    _, encoder = loaded(tmp_path, ReferenceOps)
    prompt = encoder.render(chat(("Look", SMALL, "What?")))
    tokens = torch.tensor((*prompt.token_ids, 5))
    with joined_ranks(tmp_path, 2) as ranks:
        cache = MediaCache(ranks.model, encoder, {"a": prompt})
        ranks.pools = [cache.kv] * 2
        got = torch.cat([cache.step({"a": each})[0] for each in tokens.split([len(tokens) - 1, 1])])
    torch.testing.assert_close(got, oracle("qwen3_vl", whole, [SMALL], tokens), rtol=2e-4, atol=2e-4)
