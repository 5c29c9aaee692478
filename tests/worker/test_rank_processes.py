"""Nodes whose model several processes compute: what they ship to nodes of another degree, how they end, what they
refuse.

The models are random and in float32, so anyone who mixes up heads or blocks makes other tokens."""

from __future__ import annotations

import asyncio
import gc
import random
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from kvferry.engine.models.hf import transformers_module
from kvferry.model_files.memory_needs import has_experts
from kvferry.model_files.source import resolve
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.settings import WorkerSettings
from kvferry.worker import watchdog
from kvferry.worker.engine_factory import assemble
from kvferry.worker.engine_parts import EngineParts
from tests.engine.tiny_models import DEEPSEEK_GROUPS, EXPERTS, SHAPE
from tests.toy import make_job
from tests.waiting import until, wait_for
from tests.worker_pair import Router, Worker, routed, worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
WORDS = 97
TIE = 1e-4


def saved(folder: Path, name: str, **settings: Any) -> Path:
    """A model of transformers' config class `name`."""
    transformers = transformers_module()
    torch.manual_seed(7)
    shape = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256, "eos_token_id": 2}
    config = getattr(transformers, name)(**SHAPE | shape | {"bos_token_id": 0} | settings)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four K/V heads."""
    return saved(tmp_path_factory.mktemp("tiny") / "tiny", "LlamaConfig", head_dim=16)


def assembled(path: Path, ranks: int, **settings: Any) -> EngineParts:
    """A mixture's experts are divided whole."""
    given: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "kernels": "reference",
        "kv_blocks": 64,
        "block_size": 8,
    }
    given |= {"enable_expert_parallel": ranks > 1 and has_experts(resolve(str(path)))} | settings
    return assemble(WorkerSettings(model=str(path), tensor_parallel_size=ranks, **given))


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, WORDS), k=length)


@torch.inference_mode()
def expect_likeliest(path: Path, tokens: list[int], made: list[int]) -> None:
    """Each is what transformers' own model finds likeliest behind those before it, or as likely."""
    model = transformers_module().AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    logits = model(input_ids=torch.tensor([tokens + made])).logits[0, len(tokens) - 1 : -1]
    best = logits.amax(-1)
    torch.testing.assert_close(logits.gather(1, torch.tensor(made)[:, None])[:, 0], best, rtol=0, atol=TIE)


@asynccontextmanager
async def degrees(path: Path, first: int, second: int, **settings: Any) -> AsyncIterator[Router]:
    """A prefill node of the first degree and a decode node of the second one."""
    ours, theirs = await asyncio.gather(
        *(asyncio.to_thread(assembled, path, ranks, **settings) for ranks in (first, second))
    )
    assert ours.fingerprint == theirs.fingerprint
    async with (
        worker("prefill", ours) as prefill,
        worker("decode", theirs) as decode,
        routed(prefill, decode) as router,
    ):
        yield router


async def answer(router: Router, name: str, tokens: list[int], adapter: str = "") -> tuple[list[int], Any]:
    """What both nodes make of a prompt, and what the prefill node says of its reuse."""
    sent = router.post_prefill(replace(make_job(name, tokens, 24), adapter=adapter), router.decode.target)
    first, _ = await sent.ended()
    await until(lambda: router.finished(name))
    return [*first.delta.token_ids, *router.tokens(name)], first.delta.reuse


def others(worker: Worker) -> list[psutil.Process]:
    ranks = worker.loaded.parts.ranks
    return [psutil.Process(each.pid) for each in ranks._processes] if ranks is not None else []


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2), (4, 2)])
async def test_nodes_of_different_degree_ship_to_each_other_and_reuse_what_they_have(
    path: Path, first: int, second: int
) -> None:
    await expect_shipped_and_reused(path, first, second)


@pytest.mark.parametrize(
    ("name", "settings", "first", "second"),
    [
        ("Qwen3MoeConfig", {"head_dim": 16, **EXPERTS}, 2, 1),
        ("DeepseekV3Config", {"num_attention_heads": 4, **DEEPSEEK_GROUPS}, 1, 2),
    ],
    ids=["experts", "latent"],
)
async def test_so_do_those_that_divide_experts_and_those_whose_ranks_have_one_cache(
    name: str, settings: dict[str, Any], first: int, second: int, tmp_path: Path
) -> None:
    await expect_shipped_and_reused(saved(tmp_path, name, **settings), first, second)


async def expect_shipped_and_reused(path: Path, first: int, second: int, **settings: Any) -> None:
    async with degrees(path, first, second, **settings) as router:
        tokens = prompt(100)
        made, reuse = await answer(router, "a", tokens)
        expect_likeliest(path, tokens, made)
        assert reuse.computed == 100
        longer = [*tokens, *made, 5]
        made, reuse = await answer(router, "b", longer)
        expect_likeliest(path, longer, made)
        assert (reuse.reused_prefill, reuse.computed) == (96, 29)
        longest = [*longer, *made, 6]
        await router.generate(make_job("c", longest, 24))
        await until(lambda: router.finished("c"))
        expect_likeliest(path, longest, router.tokens("c"))
        (reuse,) = [delta.reuse for delta in router.deltas if delta.request_id == "c" and delta.reuse is not None]
        assert (reuse.reused_decode, reuse.computed) == (144, 6), "what came and what its own ranks wrote"
        await router.prefill.settle()
        await router.decode.settle()
        processes = [*others(router.prefill), *others(router.decode)]
        assert len(processes) == first + second - 2
    assert not any(each.is_running() for each in processes)


@asynccontextmanager
async def two_ranks(path: Path, **settings: Any) -> AsyncIterator[tuple[Router, psutil.Process]]:
    """A decode node of two ranks, and the other one's process, which is ended in any case."""
    parts = await asyncio.to_thread(assembled, path, 2, **settings)
    async with worker("decode", parts, tensor_parallel_size=2) as node:
        (other,) = others(node)
        router = Router(node, node, "router")
        await router.connect()
        try:
            yield router, other
        finally:
            await router.close()
            with suppress(psutil.NoSuchProcess):
                other.kill()


@pytest.mark.parametrize("busy", [False, True])
async def test_a_rank_that_dies_takes_its_node_with_it_within_a_second(path: Path, busy: bool) -> None:
    async with two_ranks(path) as (router, other):
        if busy:
            await router.generate(make_job("a", prompt(100), 100))
            await until(lambda: router.tokens("a"))
        other.kill()
        assert await until(lambda: router.decode.loaded.fault) < 1.0
        # A line breaks a moment before its process has ended, of which the engine may hear first.
        late = "the engine thread ended: the 2 ranks can no longer compute together" if busy else "rank 1 ended"
        assert (router.decode.loaded.fault or "").startswith(("rank 1 ended (signal 9)", late))
        await asyncio.wait_for(asyncio.shield(router.decode.run), 5.0)
        assert not router.failed, "routers are to try another node, and no request is to blame"


@pytest.mark.parametrize("busy", [False, True])
async def test_a_rank_that_stands_still_does_too(path: Path, busy: bool) -> None:
    async with two_ranks(path) as (router, other):
        await asyncio.sleep(1.5 * watchdog.RANK_S)
        assert router.decode.loaded.fault is None, "it gives signs of life while it has nothing to do"
        other.suspend()
        if busy:
            await router.generate(make_job("a", prompt(100), 100))
        await until(lambda: router.decode.loaded.fault)
        assert re.fullmatch(r"rank 1 has made no progress for \d+ s", router.decode.loaded.fault or "")


@pytest.mark.parametrize(
    ("ranks", "settings", "why"),
    [
        (3, {}, "tensor_parallel_size 3 does not divide the model's K/V heads: 4"),
        (2, {"lora": ("a=/nowhere",)}, "adapter /nowhere"),
        (
            2,
            {"batch_invariant": True, "kernels": "auto", "pools_apart": True},
            "--tensor-parallel-size 2 is not supported with --batch-invariant where each rank has its own pool",
        ),
        (2, {"quantization": "int8"}, "quantization int8 needs bfloat16 on the cpu kernels"),
        (2, {"enable_expert_parallel": True}, "enable_expert_parallel: llama has no experts"),
        (1, {"enable_expert_parallel": True}, "--enable-expert-parallel needs --tensor-parallel-size 2 or more"),
        (2, {"model_impl": "transformers"}, "tensor_parallel_size needs kvferry's own decoder"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(path: Path, ranks: int, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as raised:
        assembled(path, ranks, **settings)
    assert "\n" not in raised.value.message


def test_a_node_that_cannot_start_leaves_no_rank_behind(path: Path) -> None:
    gc.collect()
    before = psutil.Process().children()
    with pytest.raises(ConfigError, match="lower --kv-blocks") as raised:
        assembled(path, 2, kv_blocks=10**12)
    del raised
    gc.collect()
    (rank,) = set(psutil.Process().children()) - set(before)
    wait_for(lambda: rank.status() == psutil.STATUS_ZOMBIE, 60.0)


def test_a_rank_that_cannot_load_its_part_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match=r"rank 1 exited while it loaded its part|the other ranks cannot be started"):
        assembled(path, 2)
