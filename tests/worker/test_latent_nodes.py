"""Nodes of a model with latent attention: their blocks ship as those of any other, and what is refused is one line."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvferry.model_files.memory_needs import model_needs
from kvferry.model_files.source import resolve
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.settings import WorkerSettings
from kvferry.worker.engine_factory import assemble
from kvferry.worker.engine_parts import EngineParts
from tests.engine.tiny_models import OURS, save_tiny, tokens_for
from tests.toy import finish, make_job, tokens_of
from tests.waiting import until
from tests.worker_pair import Router, routed, worker

PROMPT = tokens_for(70).tolist()
BLOCK_BYTES = {"auto": 3 * 16 * (24 + 8) * 4, "fp8": 3 * 16 * (24 + 8 + 4)}
"""Of three layers and 16 tokens, each one vector in each: of float32, or of fp8 and its scale."""


def made_of(path: Path, role: str, **settings: object) -> EngineParts:
    values = {"dtype": "float32", "kv_blocks": 40, "device": "cpu", "role": role} | settings
    return assemble(WorkerSettings(model=str(path), **values))  # type: ignore[arg-type]


@pytest.fixture(params=["deepseek-v2", "deepseek-v3"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    save_tiny(OURS[request.param](), tmp_path)
    return tmp_path


@pytest.fixture(params=BLOCK_BYTES)
def cache(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
async def router(path: Path, cache: str) -> AsyncIterator[Router]:
    parts = {role: made_of(path, role, kv_cache_dtype=cache) for role in ("prefill", "decode")}
    assert parts["prefill"].fingerprint == parts["decode"].fingerprint
    async with (
        worker("prefill", parts["prefill"]) as prefill,
        worker("decode", parts["decode"]) as decode,
        routed(prefill, decode) as running,
    ):
        yield running


def alone(path: Path, prompt: list[int], cache: str) -> list[int]:
    engine = made_of(path, "decode", kv_cache_dtype=cache).engine
    engine.add(make_job("alone", prompt, 20, ignore_eos=True))
    finish(engine)
    return tokens_of(engine, "alone")


async def test_blocks_ship_and_prefixes_are_reused(router: Router, path: Path, cache: str) -> None:
    """Tokens are those of one engine; the second prompt's whole blocks are on both nodes."""
    for name, prompt, blocks in (("a", PROMPT, 5), ("b", [*PROMPT[:64], 1, 2, 3], 1)):
        answer = router.post_prefill(make_job(name, prompt, 20, ignore_eos=True), router.decode.target)
        first, done = await answer.ended()
        await until(lambda name=name: router.finished(name))
        assert [*first.delta.token_ids, *router.tokens(name)] == alone(path, prompt, cache)
        assert (done.blocks, done.bytes) == (blocks, blocks * BLOCK_BYTES[cache])
        assert first.delta.reuse.computed == (len(prompt) if name == "a" else 3)
    await router.prefill.settle()
    await router.decode.settle()


def test_memory_is_that_of_one_vector_a_token(path: Path, cache: str) -> None:
    parts = made_of(path, "decode", kv_cache_dtype=cache)
    assert parts.layout.block_bytes == BLOCK_BYTES[cache]
    assert model_needs(resolve(str(path))).kv_bytes(parts.layout.dtype) == BLOCK_BYTES[cache] // 16
    assert parts.kv.nbytes == 40 * BLOCK_BYTES[cache]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype int8 is not supported for latent attention"),
        ({"batch_invariant": True, "dtype": "bfloat16"}, "batch_invariant needs attention other than latent"),
        ({"model_impl": "transformers"}, "latent attention runs only on kvferry's own decoder"),
    ],
)
def test_what_is_refused(settings: dict[str, object], words: str, path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        made_of(path, "decode", **settings)
