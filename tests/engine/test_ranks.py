"""Ranks of a decoder against the whole of it: equal logits, equal blocks, in every family that can be divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from joined_ranks import CPU, Threads, joined_ranks
from tiny_models import OURS, Cache, family, save_tiny, tokens_for

from engine.models import load_model
from engine.models.base import Model
from kernels.ops import Ops
from kernels.reference import ReferenceOps
from model_files.source import resolve

pytestmark = pytest.mark.usefixtures("one_thread")
WIDE = ("olmoe", "olmo2", "olmo3")
"""Norms over all heads."""
FOUR = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}


def whole(path: Path, ops: type[Ops] = ReferenceOps, **options: Any) -> Model:
    given = {"dtype": torch.float32, "impl": "kvferry"} | options
    return load_model(resolve(str(path)), device=CPU, ops=ops(), **given)


class Pooled(Cache):
    """A cache whose pool the ranks of a model have."""

    def __init__(self, ranks: Threads) -> None:
        super().__init__(ranks.model)
        ranks.kv = self.kv


def expect_equal(ranks: Threads, model: Model, tolerance: float = 1e-4) -> None:
    """Chunks, decodes, and both in one batch; and the same bytes in the same places of the pool."""
    tokens, other = tokens_for(45, 1), tokens_for(19, 2)
    ours, theirs = Pooled(ranks), Cache(model)
    for first, second in ((16, 14), (7, 1), (20, 1), (1, 1), (1, 2)):
        batch = dict(sorted({"a": tokens[:first], "b": other[:second]}.items(), key=lambda each: len(each[1]) > 1))
        tokens, other = tokens[first:], other[second:]
        for found, wanted in zip(ours.step(batch), theirs.step(batch), strict=True):
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours.kv, theirs.kv, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", [name for name in OURS if name not in (*WIDE, "gemma")])
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
