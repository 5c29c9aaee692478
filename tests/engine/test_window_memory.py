"""Memory of long sequences whose layers have windows: what full layers and windows need, plus 5 %."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvferry.engine.block_pool import BlockPool
from kvferry.engine.budget import Limits
from kvferry.engine.engine import Engine, EngineConfig
from kvferry.engine.ledger import Ledger
from kvferry.engine.runner import Runner
from kvferry.engine.window_pages import PageShares
from kvferry.protocol.layer_groups import LayerGroups
from kvferry.protocol.layout import KVLayout
from tests.toy import FINGERPRINT, make_job
from tests.windowed_toy import WindowedToy


@pytest.mark.parametrize(
    ("windows", "window"),
    [(tuple(0 if (i + 1) % 6 == 0 else 512 for i in range(26)), 512), ((128, 0) * 12, 128)],
    ids=["Gemma 3 1B", "gpt-oss-20b"],
)
def test_a_long_sequence_takes_what_its_layers_need(windows: tuple[int, ...], window: int) -> None:
    groups, tokens, size = LayerGroups(windows), 32_768, 16
    layout = KVLayout(groups.full, 1, 256, "bfloat16", size, groups=groups)
    each = 2 * 256 * 2
    needed = each * sum(tokens if not one else window for one in windows)
    assert needed <= layout.blocks_for(tokens) * layout.block_bytes <= 1.05 * needed
    assert layout.blocks_for(tokens) * layout.block_bytes < 0.65 * each * tokens * len(windows)


class Silent(WindowedToy):
    """Reads and writes nothing: only which blocks a sequence holds matters."""

    def forward(self, token_ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return torch.zeros(len(token_ids), 1)


@pytest.mark.parametrize("chunk", [256, 512])
@pytest.mark.parametrize(
    ("windows", "window"),
    [
        (tuple(0 if (i + 1) % 6 == 0 else 512 for i in range(26)), 512),
        (tuple(0 if (i + 1) % 6 == 0 else 1024 for i in range(62)), 1024),
        ((128, 0) * 12, 128),
    ],
    ids=["Gemma 3 1B", "Gemma 3 27B", "gpt-oss-20b"],
)
def test_a_long_sequence_holds_what_its_layers_need(windows: tuple[int, ...], window: int, chunk: int) -> None:
    """While its prompt is computed, too, in chunks as on a CPU: pages of the chunk are within the 5 %."""
    tokens, size = 32_768, 16
    model = Silent(windows)
    model.info = replace(model.info, max_model_len=40_000)
    assert model.info.groups is not None
    layout = model.info.layout(torch.float32, size)
    kv = torch.zeros(3000, *layout.block_shape)
    config = EngineConfig(FINGERPRINT, size, 40_000, Limits(chunk, chunk, 4))
    engine = Engine(config, Runner(model, kv, size), BlockPool(3000, Ledger(3000)))
    needed = sum(window or tokens for window in windows) / (size * model.info.groups.full)
    engine.add(make_job("a", [1] * tokens, 40))
    held = list[int]()
    while engine.has_work():
        assert engine.step()
        held.append(engine.pool.holds.num_held)
    assert max(held) <= 1.05 * needed
    assert max(held[-30:]) <= 1.03 * needed, "a stream has no pages ahead"


@pytest.mark.parametrize(("tokens", "step", "pages"), [(2_000, 256, 49), (32_768, 256, 47), (32_768, 8192, 161)])
def test_only_steps_of_long_prompts_are_shorter(tokens: int, step: int, pages: int) -> None:
    """A short prompt and a GPU's large steps keep theirs: a few percent of memory are not worth a quarter of a step."""
    groups = LayerGroups(tuple(0 if (i + 1) % 6 == 0 else 512 for i in range(26)))
    assert PageShares(groups, 16, step, 10_000).limit(-(-tokens // 16)) == pages
