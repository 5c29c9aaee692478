"""The recorded step against the same decoder run layer by layer, and against the reference."""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest
import torch

from kvferry.engine.models.base import ForwardAbandoned, ModelInfo, SuspendedPass
from kvferry.engine.models.config import DecoderConfig
from kvferry.engine.models.decoder import Decoder
from kvferry.engine.models.parameters import ParameterLoader
from kvferry.engine.models.reader import TensorReader
from kvferry.engine.models.rope import RopeTables
from kvferry.engine.models.rope_config import RopeConfig
from kvferry.engine.models.rotations import Rotations
from kvferry.kernels.batch_plan import BatchPlan
from kvferry.kernels.cpu import CpuOps, instruction_sets
from kvferry.kernels.cpu.step import MAX_DECODES, MAX_ROWS, CpuStep
from kvferry.kernels.decoder_spec import DecoderForm
from kvferry.kernels.decoder_step import OneByOne
from kvferry.kernels.ops import Ops
from kvferry.kernels.quantised_cache import quantise
from kvferry.kernels.reference import ReferenceOps
from kvferry.kernels.sampling import NO_TOKEN
from tests.kernels.paged_batch import make_plan

SETS = instruction_sets()
pytestmark = pytest.mark.skipif(not SETS, reason="installed without the CPU extension")

CPU = torch.device("cpu")
LAYERS = 3
PLAIN = DecoderConfig(
    model_type="llama",
    vocab_size=97,
    hidden_size=96,
    intermediate_size=160,
    num_layers=LAYERS,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    norm_eps=1e-5,
    tie_embeddings=True,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    head_bias=False,
    qk_norm=False,
    rope=RopeConfig(theta=10000.0, dim=32, original_max_len=512),
    rotated=(True,) * LAYERS,
    windows=(0,) * LAYERS,
)
FORMS = {
    "plain": PLAIN,
    "biased": replace(PLAIN, qkv_bias=True, o_bias=True, mlp_bias=True),
    "head norms, wide heads": replace(
        PLAIN, qk_norm=True, head_dim=64, rope=RopeConfig(theta=10000.0, dim=64, original_max_len=512)
    ),
    "windows, some not rotated": replace(PLAIN, rotated=(True, False, True), windows=(0, 20, 7)),
    "without a gate": replace(PLAIN, activation="relu2"),
    "without a gate, biased": replace(PLAIN, activation="gelu_tanh", qkv_bias=True, mlp_bias=True),
    "xIELU, head norms": replace(PLAIN, activation="xielu", qk_norm=True),
    "chunks": replace(PLAIN, windows=(0, -20, -7)),
    "half rotated": replace(PLAIN, rope=RopeConfig(theta=10000.0, dim=16, original_max_len=512)),
}


class NamedNoise:
    """Weights that depend on their names alone."""

    def read(self, name: str, out: torch.Tensor) -> None:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        spread = 1.0 if "embed" in name or out.dim() == 0 else out.shape[-1] ** -0.5
        noise = torch.randn(out.shape, generator=generator) * spread
        out.copy_(noise + 0.8 if "norm" in name else noise)
        if name.endswith("act_fn.eps"):
            out.fill_(-1e-6)  # elsewhere xIELU would jump at 0, and rounding with it

    def stored(self, name: str, shape: tuple[int, int]) -> None:
        return None


NOISE = NamedNoise()


class Layered(CpuOps):
    def record(self, form: DecoderForm, one_by_one: OneByOne) -> None:
        return None


def decoder(
    config: DecoderConfig,
    ops: Ops,
    dtype: torch.dtype = torch.bfloat16,
    quantization: str = "none",
    weights: NamedNoise = NOISE,
) -> Decoder:
    info = ModelInfo("noise", "1", config.num_layers, config.num_kv_heads, config.head_dim, config.vocab_size, 512)
    parameters = ParameterLoader(TensorReader(config, weights, CPU, dtype, ops, quantization)).load()
    return Decoder(config, info, parameters, Rotations(RopeTables(config.rope, 512, CPU)), ops)


def batch(
    config: DecoderConfig, total_lens: list[int], int8: bool = False, query_lens: list[int] | None = None
) -> tuple[BatchPlan, torch.Tensor, torch.Tensor]:
    """query_lens: of decodes, then of chunks of prompts; None: all are decodes."""
    query_lens = query_lens or [1] * len(total_lens)
    plan, blocks = make_plan(query_lens, total_lens, query_lens.count(1))
    random = torch.Generator().manual_seed(len(total_lens))
    kv = torch.randn(blocks, config.num_layers, 2, config.num_kv_heads, 16, config.head_dim, generator=random)
    tokens = torch.randint(0, config.vocab_size, (sum(query_lens),), generator=random)
    return plan, quantise(kv, torch.int8) if int8 else kv.bfloat16(), tokens


@torch.inference_mode()
def run(model: Decoder, plan: BatchPlan, kv: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden states, the pool afterwards)."""
    pool = kv.clone()
    return model.forward(tokens, pool, plan), pool


BATCHES: tuple[tuple[list[int], list[int] | None], ...] = (
    ([1], None),
    ([65], None),
    ([300, 1, 16, 17], None),
    (list(range(3, 29)), None),
    ([40, 90, 21, 7], [1, 5, 21, 7]),
)
"""Lengths of sequences, and how many tokens of each are computed."""


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_equals_the_layers_one_by_one(
    name: str, form: str, quantization: str, int8: bool, batch_invariant: bool
) -> None:
    config = FORMS[form]
    recorded, layered = (
        decoder(config, row(2, name, batch_invariant=batch_invariant), quantization=quantization)
        for row in (CpuOps, Layered)
    )
    assert recorded._step is not None
    assert layered._step is None
    for total_lens, query_lens in BATCHES:
        plan, kv, tokens = batch(config, total_lens, int8, query_lens)
        assert recorded._step.takes(plan, kv)
        expected, pool = run(layered, plan, kv, tokens)
        got, written = run(recorded, plan, kv, tokens)
        assert torch.equal(got, expected)
        assert torch.equal(written, pool)
        if query_lens is not None:
            continue
        pool = kv.clone()
        with torch.inference_mode():
            logits = recorded.next_logits(tokens, pool, plan)
            assert torch.equal(logits.values, layered.logits(expected))
            assert logits.best == logits.values.argmax(dim=-1).tolist()
            assert torch.equal(recorded.forward(tokens, pool, plan), expected)
        assert torch.equal(pool, written)


def test_prompts_whose_packed_keys_and_values_do_not_fit_beside_each_other_take_turns() -> None:
    """Seventy of 500 tokens: 10 MB."""
    plan, kv, tokens = batch(PLAIN, [40] + [500] * 70, query_lens=[1] + [3] * 70)
    expected, pool = run(decoder(PLAIN, Layered(2)), plan, kv, tokens)
    got, written = run(decoder(PLAIN, CpuOps(3)), plan, kv, tokens)
    assert torch.equal(got, expected)
    assert torch.equal(written, pool)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_bits_do_not_depend_on_threads_of_which_most_come_late(quantization: str, batch_invariant: bool) -> None:
    """64 threads on a few cores: phases, and runs, are over before most of them have a core."""
    plan, kv, tokens = batch(PLAIN, [300, 1, 16, 17])
    alone, many = (
        decoder(PLAIN, CpuOps(threads, SETS[-1], batch_invariant=batch_invariant), quantization=quantization)
        for threads in (1, 64)
    )
    expected, pool = run(alone, plan, kv, tokens)
    for _ in range(10):
        got, written = run(many, plan, kv, tokens)
        assert torch.equal(got, expected)
        assert torch.equal(written, pool)


@pytest.mark.parametrize("form", FORMS)
def test_is_near_the_reference_in_float32(form: str) -> None:
    config = FORMS[form]
    plan, kv, tokens = batch(config, [40, 3, 150])
    got = run(decoder(config, CpuOps(2)), plan, kv, tokens)[0].float()
    expected = run(decoder(config, ReferenceOps(), torch.float32), plan, kv.float(), tokens)[0]
    assert torch.corrcoef(torch.stack((got.flatten(), expected.flatten())))[0, 1] > 0.9995
    rounded = run(decoder(config, ReferenceOps()), plan, kv, tokens)[0].float()
    assert (got - expected).norm() < 1.3 * (rounded - expected).norm()


def test_a_row_does_not_depend_on_its_batch_or_on_the_threads() -> None:
    plan, kv, tokens = batch(PLAIN, [33, 150, 90])
    whole = run(decoder(PLAIN, CpuOps(1)), plan, kv, tokens)[0]
    for threads in (2, 3, 7):
        assert torch.equal(run(decoder(PLAIN, CpuOps(threads)), plan, kv, tokens)[0], whole)
    first = replace(
        plan,
        positions=plan.positions[:1],
        slots=plan.slots[:1],
        block_table=plan.block_table[:1],
        query_start=plan.query_start[:2],
        total_len=plan.total_len[:1],
        query_lens=(1,),
        total_lens=plan.total_lens[:1],
        num_decodes=1,
    )
    assert torch.equal(run(decoder(PLAIN, CpuOps(2)), first, kv, tokens[:1])[0], whole[:1])


@pytest.mark.parametrize("name", SETS)
def test_more_rows_than_stay_in_the_cache_equal_the_layers_one_by_one(name: str) -> None:
    plan, kv, tokens = batch(PLAIN, [150, 33, 260, 130], query_lens=[1, 1, 200, 3])
    expected, pool = run(decoder(PLAIN, Layered(2, name)), plan, kv, tokens)
    got, written = run(decoder(PLAIN, CpuOps(2, name)), plan, kv, tokens)
    assert torch.equal(got, expected)
    assert torch.equal(written, pool)


def halfway_of(model: Decoder, layers: int, plan: BatchPlan, kv: torch.Tensor, tokens: torch.Tensor) -> SuspendedPass:
    """Where a pass is given up after so many layers."""
    answers = iter([True] * (layers - 1) + [False])
    with pytest.raises(ForwardAbandoned) as given_up, torch.inference_mode():
        model.forward(tokens, kv, plan, lambda: next(answers))
    assert given_up.value.halfway is not None
    return given_up.value.halfway


def test_a_prompt_that_is_given_up_between_two_layers_goes_on_there() -> None:
    plan, kv, tokens = batch(PLAIN, [90, 40], query_lens=[70, 40])
    recorded, layered = decoder(PLAIN, CpuOps(2)), decoder(PLAIN, Layered(2))
    assert recorded._step is not None
    assert recorded._step.takes(plan, kv)
    whole, written = run(recorded, plan, kv, tokens)
    for layers in (1, 2):
        pools = kv.clone(), kv.clone()
        got, expected = (
            halfway_of(model, layers, plan, pool, tokens)
            for model, pool in zip((recorded, layered), pools, strict=True)
        )
        assert torch.equal(*pools)
        assert got.layer == expected.layer == layers
        assert torch.equal(got.x, expected.x)
        assert torch.equal(got.residual, expected.residual)
        run(recorded, *batch(PLAIN, [50], query_lens=[50]))
        with torch.inference_mode():
            assert torch.equal(recorded.forward(tokens, pools[0], plan, halfway=got), whole)
        assert torch.equal(pools[0], written)


def test_steps_with_streams_are_not_given_up() -> None:
    plan, kv, tokens = batch(PLAIN, [90, 40], query_lens=[1, 40])
    with torch.inference_mode():
        decoder(PLAIN, CpuOps(2)).forward(tokens, kv, plan, lambda: False)


def test_what_is_not_recorded_runs_layer_by_layer() -> None:
    model = decoder(PLAIN, CpuOps(2))
    assert model._step is not None
    plan, kv, _ = batch(PLAIN, [5, 9])
    assert not model._step.takes(batch(PLAIN, [5] * (MAX_DECODES + 1))[0], kv)
    assert not model._step.takes(batch(PLAIN, [5, MAX_ROWS], query_lens=[1, MAX_ROWS])[0], kv)
    assert not model._step.takes(plan, kv.float())
    assert not model._step.takes(plan, kv[:, :2])
    assert decoder(PLAIN, CpuOps(2), torch.float32)._step is None
    odd = replace(PLAIN, head_dim=16, rope=RopeConfig(theta=10000.0, dim=16, original_max_len=512))
    assert decoder(odd, CpuOps(2))._step is None


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    plan, kv, _ = batch(PLAIN, [5])
    with pytest.raises(ValueError, match="vocabulary"):
        run(decoder(PLAIN, CpuOps(1)), plan, kv, torch.tensor([97]))


def test_a_plan_whose_arrays_moved_on_is_read_anew() -> None:
    """The planner advances the arrays of a batch in place: the step must not have kept what was in them."""
    model = decoder(PLAIN, CpuOps(2))
    plan, kv, tokens = batch(PLAIN, [30, 7])
    following, _, _ = batch(PLAIN, [31, 8])
    expected = run(decoder(PLAIN, CpuOps(2)), following, kv, tokens)[0]
    with torch.inference_mode():
        model.forward(tokens, kv.clone(), plan)
        pool = kv.clone()
        model.forward(tokens, pool, plan)
        pool.copy_(kv)
        for name in ("positions", "slots", "block_table", "total_len"):
            getattr(plan, name).copy_(getattr(following, name))
        assert torch.equal(model.forward(tokens, pool, plan), expected)


@torch.inference_mode()
def test_a_batch_that_is_refused_leaves_nothing_behind() -> None:
    """Not even for the one before it, whose arrays are known."""
    model = decoder(PLAIN, CpuOps(2))
    plan, kv, tokens = batch(PLAIN, [30, 70, 90], query_lens=[1, 40, 20])
    expected = run(model, plan, kv, tokens)[0].clone()
    pool = kv.clone()
    model.forward(tokens, pool, plan)
    wrong, _, other = batch(PLAIN, [31, 41, 61], query_lens=[1, 41, 19])
    wrong = replace(wrong, total_len=torch.tensor([31, 41, 18], dtype=torch.int32))
    for refused in (wrong, replace(wrong, total_len=wrong.total_len * 100)):
        with pytest.raises(ValueError, match="longer than its blocks"):
            model.forward(other, pool, refused)
        pool.copy_(kv)
        assert torch.equal(model.forward(tokens, pool, plan), expected)


class Silence(NamedNoise):
    def read(self, name: str, out: torch.Tensor) -> None:
        out.zero_()


@pytest.mark.parametrize("name", SETS)
def test_the_first_of_equal_logits_is_the_best(name: str) -> None:
    plan, kv, tokens = batch(PLAIN, [5, 9, 30])
    with torch.inference_mode():
        assert decoder(PLAIN, CpuOps(2, name), weights=Silence()).next_logits(tokens, kv, plan).best == [0, 0, 0]


class OneBadRow(NamedNoise):
    def __init__(self, row: int) -> None:
        self.row = row

    def read(self, name: str, out: torch.Tensor) -> None:
        super().read(name, out)
        if name == "lm_head.weight":
            out[self.row] = torch.nan


@pytest.mark.parametrize("name", SETS)
@torch.inference_mode()
def test_a_row_without_numbers_has_no_best_token(name: str) -> None:
    """A NaN in a sequence's cache spoils its own row; one in the head's weights every row, wherever it is."""
    plan, kv, tokens = batch(PLAIN, [5, 40, 9])
    sound = decoder(PLAIN, CpuOps(2, name)).next_logits(tokens, kv.clone(), plan).best
    spoiled = kv.clone()
    spoiled[plan.block_table[1, 0], :, 1] = torch.nan
    logits = decoder(PLAIN, CpuOps(2, name)).next_logits(tokens, spoiled, plan)
    assert logits.values[1].isnan().all()
    assert sound is not None
    assert list(logits.best or ()) == [sound[0], NO_TOKEN, sound[2]]
    for row in (0, 1, 50, 95, 96):
        model = decoder(replace(PLAIN, tie_embeddings=False), CpuOps(2, name), weights=OneBadRow(row))
        assert model.next_logits(tokens, kv.clone(), plan).best == [NO_TOKEN] * 3


def test_a_step_needs_the_tokens_of_its_batch() -> None:
    model = decoder(PLAIN, CpuOps(1))
    plan, kv, tokens = batch(PLAIN, [5, 9])
    with pytest.raises(ValueError, match="fit each other"):
        run(model, plan, kv, tokens[:1])


def test_nothing_runs_before_a_batch_is_bound() -> None:
    step = decoder(PLAIN, CpuOps(1))._step
    assert isinstance(step, CpuStep)
    with pytest.raises(ValueError, match="no batch"):
        step._native.run(0, 1)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_tokens_of_one_sequence_at_once_are_as_one_after_the_other(
    name: str, form: str, int8: bool, batch_invariant: bool
) -> None:
    """Where rows read what others write: on both sides of a block's end, beside another sequence, by any team."""
    config = FORMS[form]
    ahead = 20
    plan, kv, _ = batch(config, [70 + ahead, 33], int8)
    tokens = torch.randint(0, config.vocab_size, (ahead + 1,), generator=torch.Generator().manual_seed(1))
    lens = [*range(70 + 1, 70 + ahead + 1), 33]
    rows = [0] * ahead + [1]
    table = plan.block_table[rows]
    positions = torch.tensor(lens) - 1
    slots = table.gather(1, (positions // 16)[:, None])[:, 0].long() * 16 + positions % 16
    chained = BatchPlan(
        positions=positions,
        slots=slots,
        block_table=table,
        query_start=torch.arange(len(lens) + 1, dtype=torch.int32),
        total_len=torch.tensor(lens, dtype=torch.int32),
        query_lens=(1,) * len(lens),
        total_lens=tuple(lens),
        num_decodes=len(lens),
        block_size=16,
        chained=True,
    )
    model = decoder(config, CpuOps(1, name, batch_invariant=batch_invariant))
    pool, alone = kv.clone(), []
    with torch.inference_mode():
        for i in range(len(lens)):
            one = replace(
                chained,
                positions=positions[i : i + 1],
                slots=slots[i : i + 1],
                block_table=table[i : i + 1],
                query_start=chained.query_start[:2],
                total_len=chained.total_len[i : i + 1],
                query_lens=(1,),
                total_lens=(lens[i],),
                num_decodes=1,
                chained=False,
            )
            alone.append(model.next_logits(tokens[i : i + 1], pool, one).values.clone())
        for threads, kind in ((1, CpuOps), (2, CpuOps), (5, CpuOps), (2, Layered)):
            ops = kind(threads, name, batch_invariant=batch_invariant)
            written = kv.clone()
            logits = decoder(config, ops).next_logits(tokens, written, chained)
            assert torch.equal(logits.values, torch.cat(alone))
            assert torch.equal(written, pool)
