"""The steps of a GPU's warm-up: together they are all kinds of steps that a request could be the first to need."""

from __future__ import annotations

import pytest

from kvferry.engine.request import Request
from kvferry.engine.step_slices import Slice
from kvferry.kernels.graph_inputs import CAPTURED_ROWS, CHUNK_DECODES, CHUNK_TOKENS, GraphSize, captured_size
from kvferry.kernels.logit_adjustments import Adjusted
from kvferry.worker import rates
from kvferry.worker.warmup import first_steps
from tests.kernels.paged_batch import make_plan
from tests.toy import make_engine, make_job

launch = pytest.importorskip("kvferry.kernels.triton.tile_sizes")


def chunks_of(longest: int) -> list[list[Slice]]:
    """The steps of chunks of one length that run layer by layer, or longer than any that is captured."""
    every = steps(longest, 1)
    return [parts for parts in every if not any(part.decodes for part in parts) and captured(parts) is None]


def captured(parts: list[Slice]) -> GraphSize | None:
    """The captured size of a step."""
    decodes = sum(part.decodes for part in parts)
    lens = tuple(part.count for part in parts)
    plan, _ = make_plan(lens, lens, decodes)
    return captured_size(plan)


def steps(longest: int, most: int) -> list[list[Slice]]:
    request = Request(make_job("r", [1] * (longest + 1)), b"", 16)
    return list(first_steps(request, request, longest, most))


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("size", [2, 4])
def test_every_tile_of_a_chunk_is_compiled(group: int, size: int) -> None:
    """Of 8 K/V heads on a Hopper, whose steps have 8,192 tokens at most, whatever the longest sequence."""

    def tile(tokens: int) -> object:
        tall = launch.fills(tokens * group, 8, 132)
        return launch.prefill_tile(tokens * group, 128, size, tall=tall)

    for longest in (2, 100, 2048, 2500, 4094, 8192, 20_000):
        given = {tile(parts[0].count) for parts in chunks_of(longest)}
        assert {tile(tokens) for tokens in range(2, min(longest, 8192) + 1)} <= given


def test_every_tile_of_a_product_with_codes_is_compiled() -> None:
    """Which begin at 1 row: those of decodes alone do."""

    def tile(rows: int) -> object:
        return launch.product_tile(rows, 128, 2)

    given = {tile(sum(part.count for part in parts)) for parts in steps(4096, 1)}
    assert {tile(rows) for rows in range(1, 4096)} == given


def test_a_decode_beside_a_chunk_is_compiled_once() -> None:
    """Its kernels are the same at every length."""
    mixed = [parts for parts in steps(16_384, 1) if parts[0].decodes and captured(parts) is None]
    assert [[part.decodes for part in parts[:2]] for parts in mixed] == [[True, False]]


@pytest.mark.parametrize(("most", "largest"), [(1, 1), (3, 4), (9, 16), (64, 64), (500, CAPTURED_ROWS[-1])])
def test_every_size_of_batch_is_captured_that_may_come(most: int, largest: int) -> None:
    rows = [len(parts) for parts in steps(64, most) if parts[0].start == 0 and len(parts) > 1 and parts[-1].decodes]
    singles = [parts for parts in steps(64, most) if len(parts) == 1 and parts[0].decodes]
    assert len(singles) == 1
    assert [*rows, 1] == [size for size in CAPTURED_ROWS[::-1] if size <= largest]


@pytest.mark.parametrize(("longest", "tokens"), [(2, (64,)), (64, (64,)), (100, (64, 128)), (4000, CHUNK_TOKENS)])
@pytest.mark.parametrize(("most", "decodes"), [(1, (0, 8)), (9, (0, 8, 16)), (500, CHUNK_DECODES)])
def test_every_size_of_a_step_with_chunks_is_captured_the_largest_first(
    longest: int, tokens: tuple[int, ...], most: int, decodes: tuple[int, ...]
) -> None:
    sizes = [size for parts in steps(longest, most) if (size := captured(parts)) is not None and size.tokens]
    assert sizes == [GraphSize(rows, count) for count in reversed(tokens) for rows in reversed(decodes)]


def test_an_engine_takes_them_and_its_pool_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(num_blocks=16)
    request = Request(make_job("r", [1] * 61), b"", 4)
    request.block_ids = list(range(16))
    adjusted: list[Adjusted] = []
    monkeypatch.setattr(engine.runner.model.ops, "adjust", lambda logits, rows, drawn: adjusted.extend(rows))
    rates.compile_all(engine, request, 60)
    assert [row.adjustments.counting for row in adjusted] == [True]
    assert request.sample_row is None
    engine.check_integrity()
    assert engine.pool.available == 16


def test_none_of_them_is_longer_than_there_is_room() -> None:
    for longest in (1, 2, 3, 5, 100):
        assert all(part.start + part.count <= longest for parts in steps(longest, 2) for part in parts)
