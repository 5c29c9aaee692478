"""Nodes of Gemma 3n and 4, whose layers' K/V differ in shape or are shared: blocks ship as those of any model."""

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
VECTORS = {"gemma3n": (4 * 2 * 2, 0), "gemma4": (2 * 2 * 2, 2 * 2 * 2), "gemma4-large": (3 * 2 * 2, 3 * 2)}
"""K and V vectors of a token with dims of 16 and of 32."""


def bytes_of(name: str, cache: str) -> int:
    """Of a block of 16 tokens, in float32 or in 8 bits with scales."""
    small, large = VECTORS[name]
    each = (16 + 4, 32 + 4) if cache == "int8" else (16 * 4, 32 * 4)
    return 16 * (small * each[0] + large * each[1])


def made_of(path: Path, role: str, **settings: object) -> EngineParts:
    values = {"dtype": "float32", "kv_blocks": 40, "device": "cpu", "role": role} | settings
    return assemble(WorkerSettings(model=str(path), **values))  # type: ignore[arg-type]


def alone(path: Path, prompt: list[int], cache: str) -> list[int]:
    engine = made_of(path, "decode", kv_cache_dtype=cache).engine
    engine.add(make_job("alone", prompt, 20, ignore_eos=True))
    finish(engine)
    return tokens_of(engine, "alone")


@pytest.fixture(params=VECTORS)
def name(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    save_tiny(OURS[request.param](), tmp_path)
    found: str = request.param
    return found


@pytest.fixture(params=["auto", "int8"])
async def router(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[tuple[Router, str]]:
    cache: str = request.param
    parts = {role: made_of(tmp_path, role, kv_cache_dtype=cache) for role in ("prefill", "decode")}
    assert parts["prefill"].fingerprint == parts["decode"].fingerprint
    async with (
        worker("prefill", parts["prefill"]) as prefill,
        worker("decode", parts["decode"]) as decode,
        routed(prefill, decode) as running,
    ):
        yield running, cache


async def test_blocks_ship_and_prefixes_are_reused(name: str, router: tuple[Router, str], tmp_path: Path) -> None:
    """Tokens are those of one engine; the second prompt's whole blocks are on both nodes."""
    running, cache = router
    for key, prompt, blocks in (("a", PROMPT, 5), ("b", [*PROMPT[:64], 1, 2, 3], 1)):
        answer = running.post_prefill(make_job(key, prompt, 20, ignore_eos=True), running.decode.target)
        first, done = await answer.ended()
        await until(lambda key=key: running.finished(key))
        assert [*first.delta.token_ids, *running.tokens(key)] == alone(tmp_path, prompt, cache)
        assert (done.blocks, done.bytes) == (blocks, blocks * bytes_of(name, cache))
        assert first.delta.reuse.computed == (len(prompt) if key == "a" else 3)
    await running.prefill.settle()
    await running.decode.settle()


@pytest.mark.parametrize("cache", ["auto", "int8", "fp8"])
def test_memory_is_that_of_the_layers_that_write(name: str, cache: str, tmp_path: Path) -> None:
    parts = made_of(tmp_path, "decode", kv_cache_dtype=cache)
    wanted = bytes_of(name, "int8" if cache == "fp8" else cache)
    assert parts.layout.block_bytes == wanted
    assert model_needs(resolve(str(tmp_path))).kv_bytes(parts.layout.dtype) == wanted // 16
    assert parts.kv.nbytes == 40 * wanted


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch_invariant": True, "dtype": "bfloat16"}, "batch_invariant needs"),
        ({"tensor_parallel_size": 2}, "runs on one rank"),
    ],
)
def test_what_is_refused(name: str, settings: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        made_of(tmp_path, "decode", **settings)
