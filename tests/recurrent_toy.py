"""A toy model with recurrent layers: each layer's part of a state is a number made of all tokens that it has seen, and
each token's result is wrong if that is not what the paged cache holds. And an engine around it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvferry.engine.block_pool import BlockPool
from kvferry.engine.budget import Limits
from kvferry.engine.engine import Engine, EngineConfig
from kvferry.engine.grammar_masks import GrammarMasks
from kvferry.engine.ledger import Ledger
from kvferry.engine.models.base import ForwardAbandoned, KeepGoing, ModelInfo, SuspendedPass
from kvferry.engine.runner import Runner
from kvferry.engine.state_memory import StateMemory, make_rows
from kvferry.engine.state_rows import ROWS
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.decoder_step import always
from tests.toy import FINGERPRINT, VOCAB, ToyModel

LAYERS = 4
"""Recurrent layers, each with one number of the state."""
STATE_FLOATS = 21
"""Numbers of a state's row: three blocks of eight numbers, the last one not filled."""
WRONG = 1.0
"""What is added to a token whose layers' states are not those of the tokens before it."""


def layer_state(tokens: list[int], layer: int) -> int:
    """A layer's state after these tokens; exact in float32."""
    value = layer + 1
    for token in tokens:
        value = (value * (13 + layer) + token + 1) % 99991
    return value


class RecurrentToy(ToyModel):
    """between: called before each layer. faults: called in the middle of a pass, and may raise. computed: positions of
    the tokens of all passes that came to their end. at: the layer that is computed."""

    info = ModelInfo("recurrent toy", "toy", 1, 1, 1, VOCAB, 512, state_parts=(LAYERS, STATE_FLOATS - LAYERS))
    resumable = True

    def __init__(self) -> None:
        self.between: Callable[[int], None] = lambda layer: None
        self.faults: Callable[[BatchPlan], None] = lambda plan: None
        self.computed: list[int] = []
        self.at = 0

    def forward(
        self,
        token_ids: torch.Tensor,
        kv: torch.Tensor,
        plan: BatchPlan,
        keep_going: KeepGoing = always,
        halfway: SuspendedPass | None = None,
    ) -> torch.Tensor:
        """The residual counts a token's layers whose state was wrong before it."""
        assert plan.states is not None
        first = halfway.layer if halfway else 0
        wrong = halfway.residual if halfway else torch.zeros(plan.num_tokens, 1)
        hidden = super().forward(token_ids, kv, plan)
        before, after, rows = plan.states.before.tolist(), plan.states.after.tolist(), plan.states.rows
        assert len({*after} - {-1}) == sum(each >= 0 for each in after), "one row, two states"
        goes_on = [plan.chained and index > 0 and row == after[index - 1] for index, row in enumerate(before)]
        assert not {row for row, chained in zip(before, goes_on, strict=True) if not chained} & {*after} - {-1}
        for layer in range(first, LAYERS):
            self.at = layer
            if layer > first or not halfway:
                self.between(layer)
                if plan.num_tokens != plan.num_seqs and not keep_going():
                    raise ForwardAbandoned(SuspendedPass(layer, hidden, wrong))
            at = 0
            for s, (query, total) in enumerate(zip(plan.query_lens, plan.total_lens, strict=True)):
                table = plan.block_table[s].tolist()
                seen = [int(kv[table[p // plan.block_size], 0, 1, 0, p % plan.block_size, 0]) for p in range(total)]
                state = int(rows[before[s], layer]) if before[s] >= 0 else layer + 1
                if state != layer_state(seen[: total - query], layer):
                    wrong[at : at + query] += 1
                for token in token_ids[at : at + query].tolist():
                    state = (state * (13 + layer) + token + 1) % 99991
                at += query
                if layer == LAYERS // 2:
                    self.faults(plan)
                if after[s] >= 0:
                    rows[after[s], layer] = state
        # Numbers behind the layers' fill the blocks of a checkpoint; they must travel, too.
        for begin, end in zip(before, after, strict=True):
            filled = rows[begin, LAYERS:] if begin >= 0 else torch.arange(LAYERS, STATE_FLOATS).float()
            assert filled.tolist() == list(range(LAYERS, STATE_FLOATS)), "a part of a state is lost"
            if end >= 0:
                rows[end, LAYERS:] = filled
        self.computed += plan.positions.tolist()
        return (hidden + WRONG * wrong) % VOCAB


def make_recurrent(
    num_blocks: int = 64,
    *,
    block_size: int = 4,
    budget: int = 16,
    beside: int = 8,
    seqs: int = 8,
    rows: int = 0,
    stride: int = 8,
    caching: bool = True,
    masks: GrammarMasks | None = None,
    drafts: int = 0,
    more: int = 0,
) -> Engine:
    """An engine around the recurrent toy. rows: of how many requests; 0: as many as may run. more: rows beside them."""
    kv = torch.full((num_blocks, 1, 2, 1, block_size, 1), -1.0)
    states = StateMemory(make_rows(ROWS * (rows or seqs + 1) + more, STATE_FLOATS, kv.device), kv)
    config = EngineConfig(
        FINGERPRINT, block_size, 256, Limits(budget, beside, seqs), drafts=drafts, state_stride=stride
    )
    pool = BlockPool(num_blocks, Ledger(num_blocks), prefix_caching=caching)
    return Engine(config, Runner(RecurrentToy(), kv, block_size, masks, states=states), pool)


def toy_of(engine: Engine) -> RecurrentToy:
    """The engine's model."""
    model = engine.runner.model
    assert isinstance(model, RecurrentToy)
    return model
