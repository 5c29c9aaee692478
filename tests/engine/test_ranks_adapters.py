"""Adapters of models that ranks compute: logits are those of one process, and their memory is free when it is there."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.engine.models.adapters import load_adapter
from kvferry.engine.models.base import Model
from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.kernels.lora import Adapted, Adapter
from kvferry.model_files.adapter import TARGETS, read_adapter
from kvferry.protocol.errors import ConfigError
from tests.adapter_files import save_adapter
from tests.engine.joined_ranks import Pooled, Threads, expect_equal, joined_ranks, whole
from tests.engine.test_adapters import FAMILIES, hf, targets_of
from tests.engine.tiny_models import BLOCK, Cache, family, save_tiny, tokens_for

pytestmark = pytest.mark.usefixtures("one_thread")
FOUR = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}


class Wearing:
    """A model of whose tokens some are computed with an adapter, and some with each of two."""

    def __init__(self, model: Model, *paths: Path) -> None:
        self.model = model
        self.adapters = [load_adapter(read_adapter(str(path), 64), model) for path in paths]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, token_ids: torch.Tensor, kv: torch.Tensor, plan: Any, *how: Any) -> torch.Tensor:
        tokens = [torch.arange(index, plan.num_tokens, 3 - index) for index in range(len(self.adapters))]
        adapted = tuple(Adapted(*each) for each in zip(self.adapters, tokens, strict=True) if len(each[1]))
        return self.model.forward(token_ids, kv, replace(plan, adapted=adapted), *how)


def expect_adapted(ranks: Threads, model: Model, *paths: Path, tolerance: float = 1e-4) -> None:
    ranks.model = Wearing(ranks.model, *paths)  # type: ignore[assignment]
    expect_equal(ranks, Wearing(model, *paths), tolerance)  # type: ignore[arg-type]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("cohere", "cohere2")])
def test_two_ranks_compute_what_one_process_does(name: str, apart: bool, tmp_path: Path) -> None:
    save_tiny(config := FAMILIES[name](), tmp_path / "model")
    if config.num_key_value_heads % 2:
        pytest.skip("one K/V head")
    model = hf(tmp_path / "model")
    paths = [save_adapter(tmp_path / str(seed), model, targets=targets_of(name), seed=seed) for seed in (1, 2)]
    with joined_ranks(tmp_path / "model", 2, apart=apart) as ranks:
        expect_adapted(ranks, whole(tmp_path / "model"), *paths)


@pytest.mark.parametrize("target", TARGETS)
def test_four_ranks_do_with_each_layer_alone(target: str, tmp_path: Path) -> None:
    save_tiny(family("LlamaConfig", **FOUR), tmp_path / "model")
    path = save_adapter(tmp_path / "a", hf(tmp_path / "model"), targets=(target,), rank=3)
    with joined_ranks(tmp_path / "model", 4) as ranks:
        expect_adapted(ranks, whole(tmp_path / "model"), path)


@pytest.mark.skipif(instruction_set() is None, reason="installed without the CPU extension")
def test_compiled_kernels_do_in_bfloat16(tmp_path: Path) -> None:
    save_tiny(family("LlamaConfig", head_dim=32), tmp_path / "model")
    path = save_adapter(tmp_path / "a", hf(tmp_path / "model"))
    options: dict[str, Any] = {"ops": CpuOps, "dtype": torch.bfloat16}
    with joined_ranks(tmp_path / "model", 2, **options) as ranks:
        expect_adapted(ranks, whole(tmp_path / "model", **options), path, tolerance=0.1)


def test_all_let_go_of_one_that_was_released_and_take_it_again(tmp_path: Path) -> None:
    save_tiny(family("LlamaConfig"), tmp_path / "model")
    path = save_adapter(tmp_path / "a", hf(tmp_path / "model"))
    with joined_ranks(tmp_path / "model", 2) as ranks:
        led, cache = ranks.model, Pooled(ranks)
        cache.model = wearing = Wearing(led, path)  # type: ignore[assignment]
        (first,) = cache.step({"a": tokens_for(BLOCK)})
        (own,), (theirs,) = (each for each in (wearing.adapters, ranks.others[0].adapters.values()))
        assert not getattr(own, "others", None), "what the others have the first one need not keep"
        seen = weakref.ref(theirs.layers[0]["down"][0].up)
        del theirs
        own.release()
        cache.model = again = Wearing(led, path)  # type: ignore[assignment]
        (second,) = cache.step({"b": tokens_for(BLOCK)})
        assert torch.equal(first, second)
        gc.collect()
        assert seen() is None
        assert len(ranks.others[0].adapters) == 1
        cache.model = led
        again.adapters[0].release()
        (plain,) = cache.step({"c": tokens_for(BLOCK)})
        assert not ranks.others[0].adapters
        torch.testing.assert_close(plain, *Cache(whole(tmp_path / "model")).step({"c": tokens_for(BLOCK)}))
        assert not torch.allclose(plain, first, atol=0.1)


def test_shapes_that_do_not_fit_are_told_as_of_the_whole_model(tmp_path: Path) -> None:
    save_tiny(family("LlamaConfig"), tmp_path / "model")
    wide = family("LlamaConfig", intermediate_size=128)
    save_tiny(wide, tmp_path / "wide")
    path = save_adapter(tmp_path / "a", hf(tmp_path / "wide"), targets=("down_proj",))
    files, model = read_adapter(str(path), 64), Threads(tmp_path / "model", 2).model
    with pytest.raises(ConfigError, match=r"\(\(4, 128\), \(64, 4\)\); model needs \(\(4, 96\), \(64, 4\)\)"):
        load_adapter(files, model)


def test_an_adapter_of_one_process_has_no_parts(tmp_path: Path) -> None:
    save_tiny(family("LlamaConfig"), tmp_path / "model")
    path = save_adapter(tmp_path / "a", hf(tmp_path / "model"))
    assert type(load_adapter(read_adapter(str(path), 64), whole(tmp_path / "model"))) is Adapter
