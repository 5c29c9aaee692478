"""Decode steps that are captured and replayed: by a tape over Triton's interpreter, by CUDA graphs on a GPU. Collected
by test_triton_steps.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvferry.engine.models.base import ModelInfo
from kvferry.engine.models.config import parse_config
from kvferry.engine.models.decoder import Decoder
from kvferry.engine.models.dummy_weights import DummyWeights
from kvferry.engine.models.parameters import ParameterLoader
from kvferry.engine.models.reader import TensorReader
from kvferry.engine.models.rope import RopeTables
from kvferry.engine.models.rotations import Rotations
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.cuda_graphs import GraphStep
from kvferry.kernels.graph_inputs import CAPTURED_ROWS, CHUNK_TOKENS, MAX_CHUNKS, GraphInputs, GraphSize
from kvferry.kernels.triton import TritonOps
from tests.device_plans import moved
from tests.kernels.interpreted import DEVICE
from tests.kernels.paged_batch import make_plan
from tests.kernels.tape import capture

PLACE = torch.device(DEVICE)
VOCAB, LONGEST, BLOCK = 61, 96, 16
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": LONGEST,
}

MIXTURE = CONFIG | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}


def decoder(ops: TritonOps, given: dict[str, Any] = CONFIG, dtype: torch.dtype = torch.float32) -> Decoder:
    config = parse_config(given)
    weights = DummyWeights(config)
    weights._numbers *= 12
    info = ModelInfo("m", "1", config.num_layers, config.num_kv_heads, config.head_dim, VOCAB, LONGEST)
    parameters = ParameterLoader(TensorReader(config, weights, PLACE, dtype, ops)).load()
    return Decoder(config, info, parameters, Rotations(RopeTables(config.rope, LONGEST, PLACE)), ops)


class Streams:
    """Greedy streams of one model, in blocks of their own; every slot that nobody wrote is NaN."""

    def __init__(self, model: Decoder, prompts: list[list[int]]) -> None:
        self.model, self.tokens = model, [list(prompt) for prompt in prompts]
        each = LONGEST // BLOCK
        self.chains = torch.randperm(each * len(prompts), generator=torch.Generator().manual_seed(3)).view(-1, each)
        layout = model.info.layout(model.dtype, BLOCK)
        # A row of nobody attends to the first slot of block 0, which a pool that was zeroed has.
        shape = (each * len(prompts), *layout.block_shape)
        self.kv = torch.full(shape, torch.nan, dtype=model.dtype, device=PLACE)
        self.kv[0] = 0.0
        self.logits: list[torch.Tensor] = []

    def plan(self, streams: list[int], starts: list[int]) -> BatchPlan:
        totals = [len(self.tokens[i]) for i in streams]
        plan, _ = make_plan([t - s for t, s in zip(totals, starts, strict=True)], totals, 0, BLOCK)
        table = self.chains[streams].int()
        positions = plan.positions
        rows = torch.repeat_interleave(torch.arange(len(streams)), torch.tensor(plan.query_lens))
        slots = table[rows, positions // BLOCK].long() * BLOCK + positions % BLOCK
        decodes = sum(count == 1 for count in plan.query_lens)
        made = BatchPlan(
            positions, slots, table, plan.query_start, plan.total_len, plan.query_lens, plan.total_lens, decodes, BLOCK
        )
        return moved(made, DEVICE)

    @torch.inference_mode()
    def prefill(self) -> None:
        for i, tokens in enumerate(self.tokens):
            hidden = self.model.forward(torch.tensor(tokens, device=PLACE), self.kv, self.plan([i], [0]))
            tokens.append(int(self.model.logits(hidden[-1:]).argmax()))

    @torch.inference_mode()
    def decode(self, streams: list[int]) -> None:
        starts = [len(self.tokens[i]) - 1 for i in streams]
        ids = torch.tensor([self.tokens[i][-1] for i in streams], device=PLACE)
        found = self.model.next_logits(ids, self.kv, self.plan(streams, starts)).values
        self.logits.append(found.clone())
        for i, token in zip(streams, found.argmax(-1).tolist(), strict=True):
            self.tokens[i].append(token)


BATCHES = [[0, 1, 2], [2], [1, 0], [2, 1, 0], [0, 2]]
"""They come and go, over the ends of blocks, and change places."""
PROMPTS = [[5, 9, 2], [7, 1] * 7, [*range(20, 36)]]


def run(ops: TritonOps, steps: int = len(BATCHES)) -> Streams:
    return run_model(decoder(ops), steps)


def run_model(model: Decoder, steps: int = len(BATCHES)) -> Streams:
    streams = Streams(model, PROMPTS)
    streams.prefill()
    for batch in BATCHES[:steps]:
        streams.decode(batch)
    return streams


@pytest.fixture(scope="module")
def plain() -> Streams:
    """Layer by layer."""
    return run(TritonOps(4))


def test_replayed_steps_draw_what_layers_one_by_one_draw(plain: Streams) -> None:
    taping = capture()
    replayed = run(TritonOps(4, taping))
    assert replayed.tokens == plain.tokens
    assert len({token for tokens in plain.tokens for token in tokens}) > 10
    for one, other in zip(replayed.logits, plain.logits, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert len(taping.sizes) == 4, "one for prompts, and one for each size of batch: 4, 1 and 2"
    assert DEVICE != "cpu" or taping.sizes[0] > 20
    assert torch.equal(replayed.kv.isnan(), plain.kv.isnan()), "rows of nobody wrote"
    torch.testing.assert_close(replayed.kv.nan_to_num(), plain.kv.nan_to_num(), atol=1e-4, rtol=1e-4)


def test_replayed_steps_of_a_mixture_choose_experts_anew() -> None:
    """bfloat16: only such experts are grouped. Batches of other tokens meet other experts, which no host reads."""
    taping = capture()
    eager, captured = (
        decoder(ops, MIXTURE, torch.bfloat16) for ops in (TritonOps(4, graphs=False), TritonOps(4, taping))
    )
    assert isinstance(captured._step, GraphStep)
    plain, replayed = run_model(eager), run_model(captured)
    assert len(taping.sizes) == 4
    assert replayed.tokens == plain.tokens
    assert len({token for tokens in plain.tokens for token in tokens[-len(BATCHES) :]}) > 3
    for one, other in zip(replayed.logits, plain.logits, strict=True):
        torch.testing.assert_close(one, other, atol=0.05, rtol=0.02)


def test_without_the_arrays_that_a_step_fills_a_replay_would_repeat_itself(
    plain: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tape would find if steps read anything else."""
    original = GraphInputs.fill
    calls: list[int] = []

    def once(inputs: GraphInputs, ids: torch.Tensor, plan: BatchPlan, size: GraphSize) -> slice:
        calls.append(not size.tokens)
        return original(inputs, ids, plan, size) if size.tokens or sum(calls) == 1 else slice(0, len(ids))

    monkeypatch.setattr(GraphInputs, "fill", once)
    repeated = run(TritonOps(4, capture()), 4)
    alike = [torch.allclose(*pair, atol=1e-3) for pair in zip(repeated.logits, plain.logits[:4], strict=True)]
    assert alike == [True, False, False, False]


def test_what_cannot_be_captured_runs_one_by_one(plain: Streams, caplog: pytest.LogCaptureFixture) -> None:
    def refused(run: Callable[[], Any]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    refusing = run(TritonOps(4, refused), 2)
    for one, other in zip(refusing.logits, plain.logits[:2], strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2, "each kind is tried once"


def test_batches_beyond_the_ladders_are_not_taken() -> None:
    model = decoder(TritonOps(4, capture()))
    step = model._step
    assert isinstance(step, GraphStep)
    kv = torch.zeros(1)
    most, longest, chunks = CAPTURED_ROWS[-1], CHUNK_TOKENS[-1], MAX_CHUNKS
    for decodes, lens, taken in (
        (most, [], True),
        (most + 1, [], False),
        (0, [2], True),
        (most, [2], True),
        (most + 1, [2], False),
        (0, [longest - 2, 2], True),
        (0, [longest - 1, 2], False),
        (1, [2] * chunks, True),
        (1, [2] * (chunks + 1), False),
    ):
        plan, _ = make_plan([1] * decodes + lens, [20] * decodes + lens, decodes, BLOCK)
        plan = replace(plan, total_lens=(20,) * plan.num_seqs)
        assert step.takes(plan, kv) is taken
        assert not step.takes(replace(plan, see_until=plan.positions.int()), kv) or not lens
    longer, _ = make_plan([1], [LONGEST + 1], 1, BLOCK)
    assert not step.takes(longer, kv)
