"""A toy model with windows: each layer keeps the tokens' ids in its own part of the cache, and a token's result is
wrong if any layer does not read back the tokens that it attends to. And an engine around it."""

from __future__ import annotations

import torch

from kvferry.engine.block_pool import BlockPool
from kvferry.engine.budget import Limits
from kvferry.engine.engine import Engine, EngineConfig
from kvferry.engine.grammar_masks import GrammarMasks
from kvferry.engine.ledger import Ledger
from kvferry.engine.models.base import ForwardAbandoned, KeepGoing, ModelInfo, SuspendedPass
from kvferry.engine.runner import Runner
from kvferry.engine.window_pages import WindowPages
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.decoder_step import always
from kvferry.protocol.attention_window import first_seen
from kvferry.protocol.layer_groups import LayerGroups
from tests.toy import FINGERPRINT, VOCAB, ToyModel, toy_next

WINDOW = 9
WINDOWS = (WINDOW, 0, WINDOW, WINDOW, 0)
"""Of the layers: a block has two of them, a page two blocks, of which the second is half filled."""
MARK = 1000
"""Layer i keeps a token as its id and i times this."""
WRONG = 1.0
"""What is added to a token for each layer that reads back another token than it should."""


class WindowedToy(ToyModel):
    """computed: positions of all tokens that were computed. reads: of a window, in all passes."""

    resumable = True

    def __init__(self, windows: tuple[int, ...] = WINDOWS) -> None:
        groups = LayerGroups(windows)
        self.info = ModelInfo("windowed toy", "toy", len(windows), 1, 1, VOCAB, 512, groups=groups)
        self.places = groups.places()
        self.computed: list[int] = []

    def forward(
        self,
        token_ids: torch.Tensor,
        kv: torch.Tensor,
        plan: BatchPlan,
        keep_going: KeepGoing = always,
        halfway: SuspendedPass | None = None,
    ) -> torch.Tensor:
        """The residual counts a token's layers that read something else than they should."""
        assert self.info.groups is not None
        wrong = halfway.residual if halfway else torch.zeros(plan.num_tokens, 1)
        for layer in range(halfway.layer if halfway else 0, len(self.places)):
            if layer and plan.num_tokens != plan.num_seqs and not keep_going():
                raise ForwardAbandoned(SuspendedPass(layer, wrong, wrong))
            group, place = self.places[layer]
            own = plan.of_group(group)
            kv[own.slots // plan.block_size, place, :, 0, own.slots % plan.block_size, 0] = (
                token_ids.float()[:, None] + MARK * layer
            )
            self._check(kv, plan, layer, wrong)
        self.computed += plan.positions.tolist()
        hidden = torch.zeros(plan.num_tokens, 1)
        row = 0
        full = self.info.groups.windows.index(0)
        for s, (query, total) in enumerate(zip(plan.query_lens, plan.total_lens, strict=True)):
            seen = self._read(kv, plan, full, s, range(total))
            for position in range(total - query, total):
                hidden[row] = toy_next(seen[: position + 1])
                row += 1
        return (hidden + WRONG * wrong) % VOCAB

    def _check(self, kv: torch.Tensor, plan: BatchPlan, layer: int, wrong: torch.Tensor) -> None:
        """Count what each token's layer reads that another layer, which attends to all, does not."""
        assert self.info.groups is not None
        window, full, row, begin = self.info.groups.windows[layer], self.info.groups.windows.index(0), 0, 0
        for s, (query, total) in enumerate(zip(plan.query_lens, plan.total_lens, strict=True)):
            if not (plan.chained and s and total == plan.total_lens[s - 1] + 1):
                begin = total - query  # a draft's row goes on where the one before it does
            for position in range(total - query, total):
                first = first_seen(position, window)
                known = self._read(kv, plan, full, s, range(first, begin if layer < full else position + 1))
                wrong[row] += self._read(kv, plan, layer, s, range(first, position + 1))[: len(known)] != known
                row += 1

    def _read(self, kv: torch.Tensor, plan: BatchPlan, layer: int, seq: int, positions: range) -> list[int]:
        group, place = self.places[layer]
        table, size = plan.of_group(group).block_table[seq].tolist(), plan.block_size
        return [int(kv[table[p // size], place, 1, 0, p % size, 0]) - MARK * layer for p in positions]


def make_windowed(
    num_blocks: int = 96,
    *,
    windows: tuple[int, ...] = WINDOWS,
    block_size: int = 4,
    budget: int = 16,
    beside: int = 8,
    seqs: int = 8,
    caching: bool = True,
    masks: GrammarMasks | None = None,
    drafts: int = 0,
) -> Engine:
    """An engine around the windowed toy."""
    model = WindowedToy(windows)
    kv = torch.full((num_blocks, *model.info.layout(torch.float32, block_size).block_shape), -1.0)
    config = EngineConfig(FINGERPRINT, block_size, 256, Limits(budget, beside, seqs), drafts=drafts)
    pool = BlockPool(num_blocks, Ledger(num_blocks), prefix_caching=caching)
    return Engine(config, Runner(model, kv, block_size, masks), pool)


def windowed_toy_of(engine: Engine) -> WindowedToy:
    """The engine's model."""
    model = engine.runner.model
    assert isinstance(model, WindowedToy)
    return model


def pages_of(engine: Engine) -> WindowPages:
    """The pages of the engine's requests."""
    assert isinstance(engine.states, WindowPages)
    return engine.states
