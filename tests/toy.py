"""A toy model that needs a correct KV cache: the next token is a function of every token read back through the paged
cache, so a wrong slot, table or length changes the output. And an engine around it."""

from __future__ import annotations

import threading
import time

import torch

from kvferry.engine.block_pool import BlockPool
from kvferry.engine.budget import Limits
from kvferry.engine.engine import Engine, EngineConfig
from kvferry.engine.events import Generated
from kvferry.engine.grammar_masks import GrammarMasks
from kvferry.engine.ledger import Ledger
from kvferry.engine.media.encoder import EmbeddingSource, MediaEncoder
from kvferry.engine.models.base import ForwardAbandoned, KeepGoing, Model, ModelInfo, SuspendedPass
from kvferry.engine.runner import Runner
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.decoder_step import always
from kvferry.kernels.ops import Ops
from kvferry.kernels.reference import ReferenceOps
from kvferry.protocol.messages import Job
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate

VOCAB = 101
FINGERPRINT = "toy"
HELD_S = 40.0
"""Longer than any test waits for anything."""


def toy_next(token_ids: list[int]) -> int:
    """The token that the toy model's logits favour after `token_ids`."""
    value = 7
    for token in token_ids:
        value = (value * 31 + token + 1) % 9973
    return value % VOCAB


class ToyModel(Model):
    """Keeps each token's id in the cache as its K and V, reads them back to choose the next one."""

    info = ModelInfo("toy", "toy", 1, 1, 1, VOCAB, 512)
    dtype = torch.float32
    device = torch.device("cpu")
    ops: Ops = ReferenceOps()

    def forward(
        self,
        token_ids: torch.Tensor,
        kv: torch.Tensor,
        plan: BatchPlan,
        keep_going: KeepGoing = always,
        halfway: SuspendedPass | None = None,
    ) -> torch.Tensor:
        blocks, slots = plan.slots // plan.block_size, plan.slots % plan.block_size
        kv[blocks, 0, :, 0, slots, 0] = token_ids.float()[:, None]
        hidden = torch.zeros(plan.num_tokens, 1)
        row = 0
        for s, (query, total) in enumerate(zip(plan.query_lens, plan.total_lens, strict=True)):
            table = plan.block_table[s].tolist()
            seen = [int(kv[table[p // plan.block_size], 0, 1, 0, p % plan.block_size, 0]) for p in range(total)]
            for position in range(total - query, total):
                hidden[row] = toy_next(seen[: position + 1])
                row += 1
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        favoured = hidden[:, 0].long()
        near = torch.arange(VOCAB).float()[None] * 0.01
        return near + 10.0 * torch.nn.functional.one_hot(favoured, VOCAB).float()


class HeldModel(ToyModel):
    """A toy model whose passes last until `release`, or until they are not wanted any more. `asked` counts how often
    they looked."""

    def __init__(self) -> None:
        self.begun, self.asked, self._go = threading.Event(), 0, threading.Event()

    def release(self) -> None:
        self._go.set()

    def forward(
        self,
        token_ids: torch.Tensor,
        kv: torch.Tensor,
        plan: BatchPlan,
        keep_going: KeepGoing = always,
        halfway: SuspendedPass | None = None,
    ) -> torch.Tensor:
        self.begun.set()
        deadline = time.monotonic() + HELD_S
        while not self._go.wait(0.001) and time.monotonic() < deadline:
            if not keep_going():
                raise ForwardAbandoned
            self.asked += 1
        return super().forward(token_ids, kv, plan)


def make_engine(
    num_blocks: int = 64,
    *,
    block_size: int = 4,
    budget: int = 16,
    beside: int = 8,
    seqs: int = 8,
    caching: bool = True,
    masks: GrammarMasks | None = None,
    drafts: int = 0,
    runs: type[Runner] = Runner,
    model: ToyModel | None = None,
    encoder: MediaEncoder | None = None,
    embeddings: EmbeddingSource | None = None,
) -> Engine:
    """An engine around the toy model with small limits."""
    kv = torch.full((num_blocks, 1, 2, 1, block_size, 1), -1.0)
    config = EngineConfig(FINGERPRINT, block_size, 256, Limits(budget, beside, seqs), drafts=drafts)
    pool = BlockPool(num_blocks, Ledger(num_blocks), prefix_caching=caching)
    return Engine(config, runs(model or ToyModel(), kv, block_size, masks), pool, None, encoder, embeddings)


def make_job(name: str, token_ids: list[int], max_tokens: int = 8, *, attempt: int = 0, **params: object) -> Job:
    """A greedy job."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, **params)  # type: ignore[arg-type]
    return Job(name, attempt, tuple(token_ids), len(token_ids), Generate(sampling), "router")


def runner_of(engine: Engine) -> Runner:
    """That of an engine whose model decodes."""
    assert isinstance(engine.runner, Runner)
    return engine.runner


def expected(token_ids: list[int], count: int) -> list[int]:
    """The toy model's greedy continuation."""
    tokens = list(token_ids)
    for _ in range(count):
        tokens.append(toy_next(tokens))
    return tokens[len(token_ids) :]


def tokens_of(engine: Engine, name: str) -> list[int]:
    """What a request has generated."""
    return [t for e in engine.events if isinstance(e, Generated) and e.key[0] == name for t in e.delta.token_ids]


def finish(engine: Engine) -> None:
    """Step until nothing is left to do, and check the books."""
    while engine.has_work():
        assert engine.step(), "the engine is stuck"
    engine.check_integrity()
