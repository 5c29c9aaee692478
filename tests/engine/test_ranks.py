"""Ranks of a decoder against the whole of it: equal logits, equal blocks, in every family that can be divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from kvferry.engine.fault_isolation import DeviceLost
from kvferry.engine.models.base import ForwardAbandoned
from kvferry.engine.models.config import DecoderConfig, parse_config
from kvferry.engine.ranks.shard import Shard
from kvferry.engine.ranks.weights import ShardWeights
from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.kernels.decoder_spec import StoredRows
from kvferry.kernels.quantised_codes import Codes
from kvferry.protocol.errors import ConfigError
from tests.engine.joined_ranks import DIVISIBLE, Pooled, Threads, expect_equal, joined_ranks, whole
from tests.engine.tiny_models import OURS, Cache, family, oracle_logits, save_tiny, tokens_for

pytestmark = pytest.mark.usefixtures("one_thread")
FOUR = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}


@pytest.mark.parametrize("name", DIVISIBLE)
def test_two_ranks_compute_what_one_process_does(name: str, tmp_path: Path) -> None:
    save_tiny(OURS[name](), tmp_path)
    with joined_ranks(tmp_path, 2) as ranks:
        expect_equal(ranks, whole(tmp_path))


@pytest.mark.parametrize("settings", [{}, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}])
def test_four_ranks_do_in_pieces(settings: dict[str, Any], tmp_path: Path) -> None:
    """97 words are no whole part for each of four, and 64 numbers go in 3 pieces."""
    save_tiny(family("LlamaConfig", **FOUR, **settings), tmp_path)
    with joined_ranks(tmp_path, 4, room=30) as ranks:
        expect_equal(ranks, whole(tmp_path))


def test_logits_equal_transformers(tmp_path: Path) -> None:
    save_tiny(OURS["qwen2"](), tmp_path)
    with joined_ranks(tmp_path, 2) as ranks:
        tokens = tokens_for(45, 1)
        cache = Pooled(ranks)
        torch.testing.assert_close(cache.step({"a": tokens})[0], oracle_logits(tmp_path, tokens), rtol=2e-4, atol=2e-4)


def test_all_stop_before_the_same_layer_and_some_of_the_tokens_go_on_there(tmp_path: Path) -> None:
    save_tiny(family("LlamaConfig"), tmp_path)
    tokens, other = tokens_for(20, 1), tokens_for(9, 2)
    theirs = Cache(whole(tmp_path))
    wanted, _ = theirs.step({"a": tokens, "b": other})
    for stops in (1, 2):
        with joined_ranks(tmp_path, 2) as ranks:
            cache, asked = Pooled(ranks), iter([True] * (stops - 1) + [False])
            with pytest.raises(ForwardAbandoned) as given_up:
                cache.step({"a": tokens, "b": other}, lambda: next(asked))  # noqa: B023
            halfway = given_up.value.halfway
            assert halfway is not None
            assert halfway.layer == stops
            cache.computed["a"] = 0
            (found,) = cache.step({"a": tokens}, lambda: True, halfway.of(range(20)))
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
            mine, whole_pool = cache.blocks["a"], theirs.kv[cache.blocks["a"]]
            torch.testing.assert_close(cache.kv[mine], whole_pool, rtol=1e-4, atol=1e-4)


def test_what_fails_in_the_midst_of_a_step_ends_the_device_for_good(tmp_path: Path) -> None:
    save_tiny(family("LlamaConfig"), tmp_path)
    with joined_ranks(tmp_path, 2) as ranks:
        cache = Pooled(ranks)

        def broken() -> bool:
            raise MemoryError("injected")

        with pytest.raises(DeviceLost, match="2 ranks can no longer compute together: MemoryError: injected"):
            cache.step({"a": tokens_for(9)}, broken)
        told = len(ranks.said)
        with pytest.raises(DeviceLost, match="injected"):
            cache.step({"b": tokens_for(9)})
        assert len(ranks.said) == told, "they would take it for something else"


@pytest.mark.parametrize("name", ["olmo2", "olmo3", "olmoe"])
def test_norms_over_the_heads_of_four_ranks(name: str, tmp_path: Path) -> None:
    config = OURS[name]()
    config.num_key_value_heads = 4
    save_tiny(config, tmp_path)
    tokens = tokens_for(40, 3)
    with joined_ranks(tmp_path, 4) as ranks:
        cache = expect_equal(ranks, whole(tmp_path))
        torch.testing.assert_close(cache.step({"c": tokens})[0], oracle_logits(tmp_path, tokens), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("settings", "ranks", "why"),
    [
        ({}, 4, "does not divide the model's K/V heads: 2"),
        ({"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 90}, 4, "width of the MLP: 90"),
    ],
)
def test_what_cannot_be_divided_is_named(settings: dict[str, Any], ranks: int, why: str, tmp_path: Path) -> None:
    save_tiny(family("LlamaConfig", **settings), tmp_path)
    with pytest.raises(ConfigError, match=why):
        Threads(tmp_path, ranks)


def test_weights_that_are_made_are_the_same_in_parts(tmp_path: Path) -> None:
    save_tiny(OURS["qwen3-moe"](), tmp_path)
    with joined_ranks(tmp_path, 2, load_format="dummy") as ranks:
        expect_equal(ranks, whole(tmp_path, load_format="dummy"))


@pytest.mark.skipif(instruction_set() is None, reason="installed without the CPU extension")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["LlamaConfig", "Olmo2Config"])
def test_compiled_kernels_compute_parts(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save_tiny(family(name, **{"head_dim": 32} if name == "LlamaConfig" else {"pad_token_id": 0}), tmp_path)
    with joined_ranks(tmp_path, 2, ops=CpuOps, dtype=dtype) as ranks:
        expect_equal(ranks, whole(tmp_path, CpuOps, dtype=dtype), 1e-4 if dtype == torch.float32 else 0.1)


class Stored:
    """`Weights` of one tensor, as stored."""

    def __init__(self, rows: StoredRows | Codes) -> None:
        self._rows = rows

    def read(self, name: str, out: torch.Tensor) -> None:
        raise AssertionError("it is to stay as it is stored")

    def stored(self, name: str, shape: tuple[int, int]) -> StoredRows | Codes:
        assert len(self._rows.data if isinstance(self._rows, StoredRows) else self._rows.values) == shape[0]
        return self._rows


def config_of(**settings: Any) -> DecoderConfig:
    return parse_config(family("LlamaConfig", **settings).to_dict() | {"model_type": "llama"})


def test_stored_rows_are_cut_by_outputs_and_by_blocks_of_inputs() -> None:
    config = config_of()
    data = torch.arange(6 * 4 * 34, dtype=torch.int32).to(torch.uint8).view(6, 4 * 34)
    weights = [ShardWeights(Stored(StoredRows("Q8_0", data)), config, Shard(rank, 2)) for rank in (0, 1)]
    upper, lower = (each.stored("model.layers.0.mlp.up_proj.weight", (3, 128)) for each in weights)
    assert isinstance(upper, StoredRows)
    assert isinstance(lower, StoredRows)
    assert torch.equal(torch.cat((upper.data, lower.data)), data)
    left, right = (each.stored("model.layers.0.mlp.down_proj.weight", (6, 64)) for each in weights)
    assert isinstance(left, StoredRows)
    assert isinstance(right, StoredRows)
    assert torch.equal(torch.cat((left.data, right.data), 1), data)


@pytest.mark.parametrize(
    ("groups", "block"),
    [((1, 1), None), ((6, 1), None), ((1, 4), None), ((6, 4), None), ((3, 2), (2, 16))],
    ids=["one scale", "outputs", "groups", "groups of outputs", "blocks"],
)
def test_codes_are_cut_with_their_scales(groups: tuple[int, int], block: tuple[int, int] | None) -> None:
    values = torch.arange(6 * 32, dtype=torch.int16).view(6, 32)
    codes = Codes(values, torch.arange(1.0, 1 + groups[0] * groups[1]).view(groups), block)
    parts = [ShardWeights(Stored(codes), config_of(), Shard(rank, 2)) for rank in (0, 1)]
    for name, shape, dim in (("mlp.up_proj", (3, 32), 0), ("mlp.down_proj", (6, 16), 1)):
        found = [cast("Codes", part.stored(f"model.layers.0.{name}.weight", shape)) for part in parts]
        assert torch.equal(torch.cat([each.weights(0, len(each.values)) for each in found], dim), codes.weights(0, 6))


@pytest.mark.parametrize(
    ("block", "order", "whole"), [((1, 24), None, 24), (None, torch.arange(32) % 2, 32)], ids=["wide", "unordered"]
)
def test_groups_of_codes_are_not_cut(block: tuple[int, int] | None, order: torch.Tensor | None, whole: int) -> None:
    codes = Codes(torch.ones(6, 32, dtype=torch.int8), torch.ones(6, 2), block, order)
    weights = ShardWeights(Stored(codes), config_of(), Shard(0, 2))
    with pytest.raises(ConfigError, match=f"cuts blocks of {whole} inputs of .*down_proj"):
        weights.stored("model.layers.0.mlp.down_proj.weight", (6, 16))


def test_a_block_of_inputs_is_not_cut(tmp_path: Path) -> None:
    rows = StoredRows("Q4_K", torch.zeros(64, 144, dtype=torch.uint8))
    weights = ShardWeights(Stored(rows), config_of(), Shard(0, 2))
    with pytest.raises(ConfigError, match=r"cuts blocks of 256 inputs of .*down_proj.* use --quantization none"):
        weights.stored("model.layers.0.mlp.down_proj.weight", (64, 128))


def test_words_that_are_nobodys_are_zeros() -> None:
    config = config_of()
    rows = StoredRows("Q8_0", torch.ones(97, 34, dtype=torch.uint8))
    last = ShardWeights(Stored(rows), config, Shard(3, 4)).stored("model.embed_tokens.weight", (25, 32))
    assert isinstance(last, StoredRows)
    assert last.data.sum(1).tolist() == [34] * 22 + [0] * 3
