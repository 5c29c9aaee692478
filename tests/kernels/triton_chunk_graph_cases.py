"""Steps with prompt chunks that are captured and replayed, alone and beside decodes: by a tape over Triton's
interpreter, by CUDA graphs on a GPU. Collected by test_triton_chunk_graphs.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.kernels import graph_inputs
from kvferry.kernels.cuda_graphs import GraphStep
from kvferry.kernels.decoder_spec import Latent
from kvferry.kernels.graph_inputs import GraphInputs, GraphSize, captured_size
from kvferry.kernels.reference import ReferenceOps
from kvferry.kernels.triton import TritonOps
from tests.device_plans import moved
from tests.kernels.interpreted import DEVICE, bfloat16_products  # noqa: F401
from tests.kernels.paged_batch import make_plan
from tests.kernels.recurrent_batch import Layer, convolution, delta_rule, equal, plan_of, scan
from tests.kernels.tape import capture
from tests.kernels.triton_graph_cases import MIXTURE, PLACE, Streams, decoder

PROMPTS = [[*range(3, 37)], [5, 9] * 9, [*range(40, 60)], [8, 8, 1, 7], [11] * 13]
SCHEDULE: list[dict[int, int]] = [
    {0: 20},
    {0: 9, 1: 3},
    {0: 5, 1: 14, 2: 4},
    {0: 1, 1: 1, 2: 12},
    {0: 1, 1: 1, 2: 3, 3: 2},
    {1: 1, 0: 1},
    {0: 1, 1: 1, 2: 1, 3: 2, 4: 10},
    {4: 3},
    {2: 1, 4: 1, 0: 1, 3: 1},
    {3: 1},
]
"""Tokens of each stream in each step, decodes first: chunks at many prefixes, alone, together and beside decodes."""


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes as a ladder of a tiny device: the interpreter takes long for a padding row."""
    monkeypatch.setattr(graph_inputs, "CHUNK_TOKENS", (4, 12, 24))
    monkeypatch.setattr(graph_inputs, "CHUNK_DECODES", (0, 2, 4))


class Mixed(Streams):
    """Streams whose prompts are computed in the chunks of SCHEDULE; `hidden`: of every step."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, PROMPTS)
        self.prompts = [list(prompt) for prompt in PROMPTS]
        self.done = [0] * len(PROMPTS)
        self.hidden: list[torch.Tensor] = []

    @torch.inference_mode()
    def run(self, schedule: list[dict[int, int]]) -> Mixed:
        for step in schedule:
            streams, starts = sorted(step, key=lambda i: step[i] != 1), []
            whole = [list(tokens) for tokens in self.tokens]
            ids: list[int] = []
            for i in streams:
                starts.append(self.done[i])
                self.done[i] += step[i]
                self.tokens[i] = whole[i][: self.done[i]]
                ids += self.tokens[i][starts[-1] :]
            plan = self.plan(streams, starts)
            self.tokens = whole
            given = torch.tensor(ids, device=PLACE)
            if all(count == 1 for count in step.values()):
                logits = self.model.next_logits(given, self.kv, plan).values
            else:
                hidden = self.model.forward(given, self.kv, plan)
                self.hidden.append(hidden.clone())
                logits = self.model.logits(hidden)
            ends = torch.tensor(plan.query_lens).cumsum(0) - 1
            for i, row in zip(streams, logits[ends.to(PLACE)], strict=True):
                if self.done[i] == len(self.tokens[i]):
                    self.tokens[i].append(int(row.argmax()))
            self.logits.append(logits[ends.to(PLACE)].clone())
        return self


def compare(found: Mixed, plain: Mixed, tolerance: float = 1e-4) -> None:
    assert found.tokens == plain.tokens
    for one, other in zip(found.hidden + found.logits, plain.hidden + plain.logits, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)
    assert torch.equal(found.kv.isnan(), plain.kv.isnan()), "padding rows wrote"
    torch.testing.assert_close(found.kv.nan_to_num(), plain.kv.nan_to_num(), atol=tolerance, rtol=tolerance)


@pytest.fixture(scope="module")
def plain() -> Mixed:
    """Layer by layer."""
    return Mixed(decoder(TritonOps(4))).run(SCHEDULE)


def test_replayed_chunks_are_those_of_layers_one_by_one(plain: Mixed) -> None:
    taping = capture()
    model = decoder(TritonOps(4, taping))
    found = Mixed(model).run(SCHEDULE)
    assert isinstance(model._step, GraphStep)
    sizes = model._step.sizes
    assert {size.decodes for size in sizes if size.tokens} == {0, 2, 4}
    assert {size.tokens for size in sizes} == {0, 4, 12, 24}
    assert len(sizes) == len(taping.sizes) < len(SCHEDULE), "one for each size"
    compare(found, plain)


def test_a_second_pool_is_captured_anew(plain: Mixed) -> None:
    model = decoder(TritonOps(4, capture()))
    for _ in range(2):
        compare(Mixed(model).run(SCHEDULE[:4]), Mixed(decoder(TritonOps(4))).run(SCHEDULE[:4]))


def test_replayed_chunks_of_a_mixture_choose_experts_anew() -> None:
    """bfloat16: only such experts are grouped. The second step replays the graph of the first one."""
    schedule = [{1: 3}, {1: 4}]
    eager, captured = (
        decoder(ops, MIXTURE, torch.bfloat16) for ops in (TritonOps(4, graphs=False), TritonOps(4, capture()))
    )
    found, wanted = Mixed(captured).run(schedule), Mixed(eager).run(schedule)
    assert found.tokens == wanted.tokens
    for one, other in zip(found.logits, wanted.logits, strict=True):
        torch.testing.assert_close(one, other, atol=0.05, rtol=0.02)


def test_without_chunks_that_can_be_captured_decodes_still_are(plain: Mixed, caplog: pytest.LogCaptureFixture) -> None:
    """As when memory does not suffice for the largest chunk."""
    taping, calls = capture(), []

    def refusing(run: Callable[[], Any]) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return taping(run)

    model = decoder(TritonOps(4, refusing))
    compare(Mixed(model).run(SCHEDULE), plain)
    assert isinstance(model._step, GraphStep)
    assert model._step.sizes
    assert not any(size.tokens for size in model._step.sizes)
    assert [record.levelname for record in caplog.records] == ["WARNING"], "it is tried once"


def test_latent_attention_beside_chunks_runs_layer_by_layer() -> None:
    """Whether keys are expanded is decided by the chunk's length."""
    for attention, taken in ((object.__new__(Latent), False), (None, True)):
        form: Any = SimpleNamespace(layers=[SimpleNamespace(attention=attention, mlp=None)], cos=torch.zeros(64, 1))
        step = TritonOps(4, capture()).record(form, lambda ids, kv, plan: ids)
        assert step is not None
        chunk, _ = make_plan([3], [9], 0)
        assert step.takes(chunk, torch.zeros(1)) is taken
        decodes, _ = make_plan([1], [9], 1)
        assert step.takes(decodes, torch.zeros(1))


def test_a_graph_of_a_short_context_is_replayed_at_a_longer_one() -> None:
    """Its attention reads lengths on the device."""
    short, long = [{0: 20}], [{0: 20}, {0: 14}]
    model = decoder(TritonOps(4, capture()))
    Mixed(model).run(short)
    assert isinstance(model._step, GraphStep)
    assert model._step.sizes == [GraphSize(0, 24)]
    compare(Mixed(model).run(long), Mixed(decoder(TritonOps(4))).run(long))
    assert DEVICE != "cpu" or len(model._step.sizes) == 1


@pytest.mark.parametrize(("make", "name"), [(convolution, "LFM2"), (delta_rule, "tiny"), (scan, "odd")])
def test_states_of_recurrent_layers_pass_padding_rows_by(make: Callable[..., Layer], name: str) -> None:
    """Padding rows hold NaN, before decodes and behind chunks; a batch before had more of both."""
    inputs: GraphInputs | None = None
    numbers = [((1, 1, 1, 9, 8), (5, -1, 3, 2, -1), (4, 1, 6, 0, 7)), ((1, 3, 2), (2, -1, 5), (3, 4, 6))]
    for lens, before, after in numbers:
        layer = make(name, sum(lens), torch.float32)
        rows = layer.rows(8)
        wanted, own = rows.clone(), rows.to(PLACE)
        expected = layer.run(ReferenceOps(), plan_of(lens, wanted, before, after))
        zeros = torch.zeros(sum(lens), dtype=torch.int64)
        of_seqs = torch.ones(len(lens), dtype=torch.int32)
        plan = replace(
            plan_of(lens, own, before, after),
            positions=zeros,
            slots=zeros,
            block_table=of_seqs[:, None],
            total_len=of_seqs,
        )
        plan = moved(plan, DEVICE)
        if inputs is None or plan.states is None:
            inputs = GraphInputs(64, plan.block_size, PLACE, own, chunks=True)
        inputs.states = own
        size = captured_size(plan)
        assert size is not None
        place = inputs.fill(zeros.to(PLACE), plan, size)
        padded = []
        for index, each in enumerate(layer.inputs):
            if each is not None and index in layer.of_tokens:
                wide = torch.full((size.decodes + size.tokens, *each.shape[1:]), torch.nan, device=PLACE)
                wide[place] = each.to(PLACE)
                each = wide
            padded.append(None if each is None else each.to(PLACE))
        found = replace(layer, inputs=tuple(padded)).run(TritonOps(1), inputs.plan(size))
        equal(found[place].cpu(), expected, torch.float32, 1e-5 if DEVICE == "cpu" else 5e-3)
        equal(own.cpu(), wanted, torch.float32, 1e-5 if DEVICE == "cpu" else 5e-3)
