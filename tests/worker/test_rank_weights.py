"""Nodes of several ranks whose weights are not the checkpoint's alone, with adapters or in int8, and batch-invariant
ones."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from kvferry.engine.models.hf import transformers_module
from kvferry.kernels.cpu import instruction_set
from kvferry.protocol.adapters import ChangeAdapter
from kvferry.protocol.wire import pack
from tests.adapter_files import merge, save_adapter
from tests.worker.test_rank_processes import answer, assembled, degrees, expect_likeliest, prompt, saved

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.mark.parametrize("apart", [False, True])
async def test_nodes_of_different_degree_serve_adapters_together(apart: bool, tmp_path: Path) -> None:
    """One from the start; then another one in its place."""
    path = saved(tmp_path / "model", "LlamaConfig", head_dim=16)
    adapters = []
    for seed in (1, 2):
        model = transformers_module().AutoModelForCausalLM.from_pretrained(path)
        adapters.append(save_adapter(tmp_path / f"adapter-{seed}", model, seed=seed))
        merge(model, adapters[-1]).save_pretrained(tmp_path / f"merged-{seed}")
    tokens = prompt(100)
    async with (
        degrees(path, 2, 1, lora=(f"name={adapters[0]}",), pools_apart=apart) as router,
        httpx.AsyncClient(trust_env=False, timeout=15.0) as client,
    ):
        nodes, answers = (router.prefill, router.decode), []
        for seed in (1, 2):
            (held,) = {node.loaded.lease().adapters for node in nodes}
            made, reuse = await answer(router, f"adapted-{seed}", tokens, held[0].id)
            expect_likeliest(tmp_path / f"merged-{seed}", tokens, made)
            assert reuse.computed == 100, "blocks are of one adapter"
            answers.append(made)
            for change in (ChangeAdapter("name"), ChangeAdapter("name", str(adapters[1]))):
                for node in nodes:
                    sent = await client.post(f"{node.node.address.url}/adapters", content=pack(change))
                    assert sent.status_code == 202, sent.text
        made, _ = await answer(router, "plain", tokens)
        expect_likeliest(path, tokens, made)
        assert made not in answers
        for node in nodes:
            await node.settle()


@pytest.mark.skipif(instruction_set() is None, reason="installed without the CPU extension")
async def test_nodes_of_different_degree_are_one_model_in_int8(tmp_path: Path) -> None:
    path = saved(tmp_path, "LlamaConfig", head_dim=32, intermediate_size=128)
    settings = {"quantization": "int8", "kernels": "auto", "dtype": "bfloat16"}
    async with degrees(path, 2, 1, **settings) as router:  # type: ignore[arg-type]
        tokens = prompt(100)
        made, _ = await answer(router, "a", tokens)
        _, reuse = await answer(router, "b", [*tokens, *made, 5])
        assert (len(made), reuse.reused_prefill) == (24, 96)
        await router.prefill.settle()
        await router.decode.settle()


@pytest.mark.skipif(instruction_set() is None, reason="installed without the CPU extension")
async def test_batch_invariant_nodes_are_of_one_degree(tmp_path: Path) -> None:
    """Others add up in another order."""
    path = saved(tmp_path, "LlamaConfig", head_dim=32)
    settings = {"batch_invariant": True, "kernels": "auto", "dtype": "bfloat16"}
    async with degrees(path, 2, 2, **settings) as router:  # type: ignore[arg-type]
        tokens = prompt(100)
        made, _ = await answer(router, "a", tokens)
        again, reuse = await answer(router, "b", tokens)
        assert (again, reuse.reused_prefill) == (made, 96)
        of_two = router.prefill.loaded.parts.fingerprint
        await router.prefill.settle()
        await router.decode.settle()
    assert assembled(path, 1, **settings).fingerprint != of_two
