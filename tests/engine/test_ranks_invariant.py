"""Ranks that share their pool give a token the same bits in every batch."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.protocol.errors import ConfigError
from kvferry.worker.batch_invariance import require_batch_invariance
from tests.engine.joined_ranks import Pooled, Threads, joined_ranks
from tests.engine.tiny_models import EXPERTS, family, save_tiny, tokens_for

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(instruction_set() is None, reason="installed without the CPU extension"),
]
EIGHT = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}


@pytest.mark.parametrize("room", [1 << 12, 100])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("name", "settings", "whole_experts"),
    [("LlamaConfig", {}, False), ("Qwen3MoeConfig", EXPERTS, False), ("Qwen3MoeConfig", EXPERTS, True)],
)
def test_the_same_bits_alone_in_chunks_and_beside_others(
    name: str, settings: dict[str, int], whole_experts: bool, ranks: int, room: int, tmp_path: Path
) -> None:
    """Whatever is brought together in one piece, and whichever rank has more threads."""
    save_tiny(family(name, **EIGHT, **settings), tmp_path)
    tokens, others = tokens_for(40, 1), tokens_for(40, 2)
    found = []
    for threads in (1, 2):
        ops = partial(CpuOps, threads, batch_invariant=True)
        with joined_ranks(
            tmp_path, ranks, ops=ops, dtype=torch.bfloat16, whole_experts=whole_experts, room=room
        ) as joined:
            require_batch_invariance(joined.model)
            found.append(torch.cat(Pooled(joined).step({"a": tokens})))
            cache = Pooled(joined)
            got = [cache.step({"a": tokens[:17], "b": others[:3]})[0], cache.step({"a": tokens[17:30]})[0]]
            for i in range(30, 40):
                batch = {"a": tokens[i : i + 1], "b": others[i - 27 : i - 26], "c": others[:5]}
                got.append(cache.step(batch)[0])
            found.append(torch.cat(got))
    assert all(torch.equal(each, found[0]) for each in found)


def test_norms_over_the_heads_of_all_ranks_are_refused(tmp_path: Path) -> None:
    save_tiny(family("Olmo2Config", pad_token_id=0, **EIGHT), tmp_path)
    ops = partial(CpuOps, 1, batch_invariant=True)
    model = Threads(tmp_path, 2, ops=ops, dtype=torch.bfloat16).model
    with pytest.raises(ConfigError, match="batch_invariant needs norms of q and k within heads"):
        require_batch_invariance(model)
