"""The canary: a decode node computes some prompts itself that came by ships. Nodes that compute alike always agree, one
that computes otherwise is found whatever is wrong with it, and nobody waits for any of that."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from kvferry.engine import canary as canary_module
from kvferry.engine import output_tolerance, scheduler
from kvferry.engine.batch_planner import Part
from kvferry.engine.block_interfaces import REQUEST
from kvferry.engine.block_pool import BlockPool
from kvferry.engine.budget import Limits
from kvferry.engine.canary import BUSY_S, IDLE_FACTOR, MAX_S, Canary
from kvferry.engine.canary_state import CHECK_ROWS
from kvferry.engine.engine import Engine, EngineConfig
from kvferry.engine.events import BlocksChanged, CanaryChecked, Computed, Generated, Reserved
from kvferry.engine.fault_isolation import DeviceLost
from kvferry.engine.ledger import Ledger
from kvferry.engine.loop import EngineLoop
from kvferry.engine.models import load_model
from kvferry.engine.models.base import ForwardAbandoned, KeepGoing, Model
from kvferry.engine.models.decoder import Decoder
from kvferry.engine.runner import Runner
from kvferry.engine.state_memory import StateMemory, make_rows
from kvferry.engine.state_rows import ROWS
from kvferry.kernels.decoder_step import always
from kvferry.kernels.ops import select
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.source import resolve
from kvferry.protocol.messages import Job
from kvferry.protocol.process_names import NodeName
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate
from kvferry.worker.recurrent_states import checked_states
from tests.engine.tiny_models import BLOCK, OURS, VOCAB, save_tiny
from tests.toy import runner_of
from tests.waiting import wait_for

CPU = torch.device("cpu")
SENDER: NodeName = ("p1", 7)
BLOCKS = 64
PROMPT = random.Random(5).choices(range(VOCAB), k=43)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(OURS["llama3"](), path)
    return path


def load(path: Path, dtype: torch.dtype = torch.float32, ops: str = "reference", quantization: str = "none") -> Model:
    chosen = ReferenceOps() if ops == "reference" else select(ops, CPU)
    return load_model(resolve(str(path)), device=CPU, dtype=dtype, ops=chosen, quantization=quantization)


def engine_of(model: Model, cache: torch.dtype | None = None, blocks: int = BLOCKS) -> Engine:
    layout = model.info.layout(cache or model.dtype, BLOCK)
    kv = torch.zeros((blocks, *layout.block_shape), dtype=getattr(torch, layout.dtype))
    config = EngineConfig("f", BLOCK, 120, Limits(24, 8, 8))
    floats = model.info.state_floats
    states = StateMemory(make_rows(ROWS * 9 + CHECK_ROWS, floats, CPU), kv) if floats else None
    return Engine(config, Runner(model, kv, BLOCK, states=states), BlockPool(blocks, Ledger(blocks)))


class Pair:
    """A prefill engine and a decode engine with a canary, and a link that copies blocks between them."""

    def __init__(self, prefill: Model, decode: Model, *, cache: torch.dtype | None = None, rate: float = 1.0) -> None:
        self.prefill, self.decode = engine_of(prefill, cache), engine_of(decode, cache)
        self.runner = runner_of(self.decode)
        self.clock, self.chance = Clock(), [0.99]
        tolerated = output_tolerance.tolerance(decode.dtype, cache or decode.dtype, exact=False)
        self.canary = self.decode.canary = Canary(
            self.decode.pool, self.decode.request_table, self.runner, self.decode.events, block_size=BLOCK,
            rate=rate, tolerated=tolerated, states=checked_states(self.decode.states, decode.info), clock=self.clock,
            draw=lambda: self.chance[0],
        )  # fmt: skip
        self.spoil: Callable[[torch.Tensor], object] = lambda block: None
        self._ships = 0

    def reserve(self, tokens: list[int], max_tokens: int = 4, **params: object) -> tuple[Job, Reserved]:
        """Blocks for a prompt there."""
        self._ships += 1
        sampling = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **params})  # type: ignore[arg-type]
        job = Job(f"r{self._ships}", 0, tuple(tokens), len(tokens), Generate(sampling), "router")
        self.decode.reserve(job.request_id, job)
        self.decode.stepper.admit_grants()
        (reserved,) = [e for e in self.decode.events if isinstance(e, Reserved) and e.owner == job.request_id]
        return job, reserved

    def land(self, job: Job, reserved: Reserved, sender: NodeName = SENDER) -> None:
        """Compute it here, bring it there, and let it begin there."""
        transfer = int(job.request_id[1:])
        self.prefill.add(job, transfer=transfer, first_block=reserved.first_block, prefill_only=True)
        while self.prefill.has_work():
            assert self.prefill.step()
        for event in self.prefill.events:
            if isinstance(event, Computed):
                for index, block_id in event.blocks:
                    target = reserved.block_ids[index - reserved.first_block]
                    self.runner.kv[target] = runner_of(self.prefill).kv[block_id]
                    self.spoil(self.runner.kv[target])
        (first,) = [e.delta for e in self.prefill.events if isinstance(e, Generated)]
        self.prefill.transfer_holds.ship_quiet(transfer)
        self.prefill.events.clear()
        self.decode.start(job.request_id, first, 0, sender)

    def ship(self, tokens: list[int], sender: NodeName = SENDER, **params: object) -> None:
        self.land(*self.reserve(tokens, **params), sender)  # type: ignore[arg-type]

    def finish(self) -> None:
        while self.decode.has_work():
            assert self.decode.step()

    def look(self) -> list[CanaryChecked]:
        """Let the canary do all that it has to."""
        while self.canary:
            self.clock.now += 1.01 * (self.canary.pause_s() or 0.0)
            self.canary.turn(lambda: True)
        self.decode.check_integrity()
        return [event for event in self.decode.events if isinstance(event, CanaryChecked)]

    def looks(self, tokens: list[int], **params: object) -> CanaryChecked:
        self.decode.events.clear()
        self.ship(tokens, **params)  # type: ignore[arg-type]
        self.finish()
        (found,) = self.look()
        return found


FORMATS = [
    (torch.float32, None),
    (torch.float32, torch.int8),
    (torch.bfloat16, None),
    (torch.bfloat16, torch.int8),
    (torch.bfloat16, torch.float8_e4m3fn),
]


@pytest.mark.parametrize(("dtype", "cache"), FORMATS)
@pytest.mark.parametrize("ops", ["reference", "cpu"])
def test_nodes_that_compute_alike_agree(
    checkpoint: Path, dtype: torch.dtype, cache: torch.dtype | None, ops: str
) -> None:
    """With other kernels in other batches, too; for prompts that fill their blocks and such that do not."""
    pair = Pair(load(checkpoint, dtype), load(checkpoint, dtype, ops), cache=cache)
    for seed, length in enumerate((1, 2, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 43, 90)):
        found = pair.looks(random.Random(seed).choices(range(VOCAB), k=length))
        assert (found.outcome, found.sender, found.tokens) == ("agreed", SENDER, length)
        assert found.distance <= found.tolerated / 2, f"near a false alarm with {length} tokens"


@pytest.mark.parametrize("cache", [None, torch.int8])
@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_nodes_whose_layers_differ_in_shape_agree_and_are_found_out(
    name: str, cache: torch.dtype | None, tmp_path: Path
) -> None:
    save_tiny(OURS[name](), tmp_path)
    pair = Pair(load(tmp_path), load(tmp_path), cache=cache)
    for length in (1, BLOCK + 1, 43, 90):
        assert pair.looks(random.Random(length).choices(range(VOCAB), k=length)).outcome == "agreed"
    blocks = iter(range(100))

    def flip(block: torch.Tensor) -> None:
        if next(blocks) == 2:
            block.view(torch.uint8).view(-1)[-1] ^= 0x40  # of an exponent, in the last layer that has a part

    pair.spoil = flip
    assert pair.looks(PROMPT).outcome == "differed"


def test_batch_invariant_nodes_agree_to_the_bit(tmp_path: Path) -> None:
    """So there nothing need be tolerated."""
    save_tiny(OURS["qwen3"](), tmp_path)
    ops = select("cpu", CPU, batch_invariant=True)
    models = [load_model(resolve(str(tmp_path)), device=CPU, dtype=torch.bfloat16, ops=ops) for _ in range(2)]
    pair = Pair(*models)
    pair.canary._tolerated = output_tolerance.tolerance(torch.bfloat16, torch.bfloat16, exact=True)
    for length in (1, BLOCK, 43, 90):
        found = pair.looks(random.Random(length).choices(range(VOCAB), k=length))
        assert (found.outcome, found.distance, found.tolerated) == ("agreed", 0.0, 0.0)


def weight(model: Model) -> None:
    """One number of one norm."""
    model.parameters.layers[1].post_norm[3] *= 4  # type: ignore[attr-defined]


def rope(model: Model) -> None:
    """Positions are off by one."""
    assert isinstance(model, Decoder)
    cos, sin = (each.roll(1, 0) for each in model._rotations.rope)
    model._rotations.rope = model._rotations.local = cos, sin


def head(model: Model) -> None:
    """K and V are right, the token drawn behind them is not."""
    logits = model.logits
    model.logits = lambda hidden: -logits(hidden)  # type: ignore[method-assign]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", [weight, rope, head])
def test_a_node_that_computes_otherwise_is_found(
    checkpoint: Path, dtype: torch.dtype, wrong: Callable[[Model], None]
) -> None:
    prefill = load(checkpoint, dtype)
    wrong(prefill)
    found = Pair(prefill, load(checkpoint, dtype)).looks(PROMPT)
    assert (found.outcome, found.key[0], found.router_id) == ("differed", "r1", "router")
    assert found.distance > 1.5 * found.tolerated


def test_weights_quantised_on_one_node_alone_are_found(checkpoint: Path) -> None:
    found = Pair(load(checkpoint, torch.bfloat16, "cpu", "int8"), load(checkpoint, torch.bfloat16, "cpu")).looks(PROMPT)
    assert found.outcome == "differed"


@pytest.mark.parametrize("cache", [None, torch.int8, torch.float8_e4m3fn])
def test_memory_that_goes_bad_before_its_checksum_is_taken_is_found(
    checkpoint: Path, cache: torch.dtype | None
) -> None:
    """One number in one of six blocks."""
    pair = Pair(load(checkpoint), load(checkpoint), cache=cache)
    blocks = iter(range(100))

    def flip(block: torch.Tensor) -> None:
        if next(blocks) == 2:
            block.view(torch.uint8).view(-1)[-1] ^= 0x40  # of an exponent

    pair.spoil = flip
    assert pair.looks(PROMPT).outcome == "differed"
    gone = [h for event in pair.decode.events if isinstance(event, BlocksChanged) for h in event.removed]
    assert len(gone) == 5, "what it brought is not found any more"
    assert pair.decode.pool.findable() == []
    assert pair.looks(PROMPT[::-1]).outcome == "agreed"


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_blocks_that_are_no_numbers_are_found(checkpoint: Path, number: float) -> None:
    pair = Pair(load(checkpoint), load(checkpoint))
    pair.spoil = lambda block: block[0, 0, 0, 0].fill_(number)
    assert pair.looks(PROMPT, max_tokens=2).distance == math.inf


def test_who_draws_by_chance_or_by_other_rules_is_judged_by_its_blocks_alone(checkpoint: Path) -> None:
    prefill = load(checkpoint)
    head(prefill)
    pair = Pair(prefill, load(checkpoint))
    assert pair.looks(PROMPT, temperature=1.0).outcome == "agreed"
    assert pair.looks(PROMPT[1:], repetition_penalty=1.3).outcome == "agreed"
    assert pair.looks(PROMPT[2:]).outcome == "differed"


def test_a_sender_answers_for_what_it_shipped_and_not_for_what_was_here(checkpoint: Path) -> None:
    """The blocks before its own are wrong here: that is not its fault. Its own behind right ones would be."""
    pair = Pair(load(checkpoint), load(checkpoint))
    assert pair.looks(PROMPT[:32]).outcome == "agreed"
    held = pair.decode.pool.match(pair.decode.pool.findable())
    assert len(held) >= 3
    for block_id in held[:3]:
        pair.runner.kv[block_id] += 1.0
    found = pair.looks(PROMPT)
    assert (found.outcome, found.tokens) == ("agreed", len(PROMPT))
    pair.spoil = lambda block: block.add_(1.0)
    assert pair.looks([*PROMPT[:32], *range(20)]).outcome == "differed"


def test_ships_are_looked_at_until_one_agrees_then_a_share_of_them(checkpoint: Path) -> None:
    prefill = load(checkpoint)
    pair = Pair(prefill, load(checkpoint), rate=0.25)
    prompts = iter(random.Random(i).choices(range(VOCAB), k=20) for i in range(100))

    def looked(sender: NodeName = SENDER) -> list[str]:
        pair.decode.events.clear()
        pair.ship(next(prompts), sender=sender)
        pair.finish()
        return [found.outcome for found in pair.look()]

    assert looked() == ["agreed"]
    assert looked() == []
    assert looked(("p2", 1)) == ["agreed"], "another node"
    assert looked(("p1", 8)) == ["agreed"], "the same after a restart"
    pair.chance[0] = 0.2
    assert looked() == ["agreed"]
    weight(prefill)
    assert looked() == ["differed"]
    pair.chance[0] = 1.0
    assert looked() == ["differed"], "after one that differed, all"
    assert looked(("p2", 1)) == []


def test_landed_blocks_may_be_written_behind_exchanged_or_let_go(checkpoint: Path) -> None:
    """Two ships of one prompt are on their way: the blocks of the second one are exchanged for those of the first."""
    pair = Pair(load(checkpoint), load(checkpoint))
    ways = [pair.reserve(PROMPT, max_tokens=20) for _ in range(2)]
    pair.land(*ways[0], sender=("p2", 1))
    pair.finish()
    assert len(pair.look()) == 1
    pair.land(*ways[1])
    (request,) = pair.decode.request_table.running
    assert pair.canary
    assert request.block_ids[0] != ways[1][1].block_ids[0]
    pair.finish()
    assert [found.outcome for found in pair.look()] == ["agreed", "agreed"]
    assert pair.decode.pool.available == BLOCKS


def ends_well_though_idle_blocks_are_taken(pair: Pair) -> None:
    """The request ends, all idle blocks are evicted for others, who leave again, and then the check ends."""
    pair.finish()
    assert pair.canary
    pool = pair.decode.pool
    blocks = pool.acquire("others", REQUEST, [], pool.available)
    assert blocks
    pair.decode.check_integrity()
    pool.release("others", REQUEST, blocks)
    assert [found.outcome for found in pair.look()][-1:] == ["agreed"]
    assert pool.available == BLOCKS


def test_the_blocks_before_the_received_ones_stay_as_long_as_these(checkpoint: Path) -> None:
    """They were evicted when the request had ended, below blocks that the check still held."""
    pair = Pair(load(checkpoint), load(checkpoint))
    assert pair.looks(PROMPT[:32]).outcome == "agreed"
    job, reserved = pair.reserve(PROMPT)
    assert reserved.first_block >= 3
    pair.land(job, reserved)
    ends_well_though_idle_blocks_are_taken(pair)


def test_what_replaces_a_received_block_stays_as_long_as_the_blocks_behind_it(checkpoint: Path) -> None:
    pair = Pair(load(checkpoint), load(checkpoint))
    ways = [pair.reserve(PROMPT[: 8 * count], max_tokens=2) for count in (2, 4)]
    pair.land(*ways[0], sender=("p2", 1))
    pair.finish()
    assert len(pair.look()) == 1
    pair.land(*ways[1])
    (request,) = pair.decode.request_table.running
    assert request.block_ids[0] != ways[1][1].block_ids[0], "exchanged, and those behind not"
    ends_well_though_idle_blocks_are_taken(pair)


def test_nobody_waits(checkpoint: Path) -> None:
    """Streams run alone at first, then a small piece is computed now and then; a piece that is not wanted any more ends
    at once and is begun anew."""
    pair = Pair(load(checkpoint), load(checkpoint))
    pair.ship(PROMPT, max_tokens=60)
    computed: list[int] = []
    look = pair.runner.compute_logits

    def timed(
        token_ids: Sequence[int],
        part: Part,
        rows: int,
        keep_going: KeepGoing = always,
        states: object = None,
    ) -> torch.Tensor:
        pair.clock.now += 0.01
        made = look(token_ids, part, rows, keep_going)
        computed.append(part.count)
        return made

    pair.runner.compute_logits = timed  # type: ignore[method-assign]
    pair.canary.turn(lambda: True)
    assert computed == []
    assert pair.canary.pause_s() == pytest.approx(BUSY_S)
    pair.clock.now += BUSY_S
    pair.canary.turn(lambda: False)
    assert computed == [], "something came in the middle"
    assert pair.canary.pause_s() == pytest.approx(0.01 * IDLE_FACTOR)
    pair.clock.now += 0.01 * IDLE_FACTOR + 1e-6
    pair.canary.turn(lambda: True)
    assert computed == [canary_module.BESIDE_TOKENS]
    pair.finish()
    assert [found.outcome for found in pair.look()] == ["agreed"]
    assert computed[1:] == [27, 1, 1]


def test_it_lets_go_where_blocks_grow_short(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "ARRIVING", 1)  # all blocks may be promised at once
    pair = Pair(load(checkpoint), load(checkpoint))
    pair.ship(PROMPT)
    pair.canary.yield_blocks()
    assert pair.canary
    for number in range(4):
        job = Job(f"l{number}", 0, (number,) * 100, 100, Generate(SamplingParams()), "router")
        pair.decode.reserve(number, job)
    pair.canary.yield_blocks()
    assert not pair.canary
    pair.decode.stepper.admit_grants()
    assert all(request.block_ids for request in pair.decode.request_table)
    assert [found.outcome for found in pair.decode.events if isinstance(found, CanaryChecked)] == ["dropped"]


def test_it_is_dropped_where_it_takes_too_long_cannot_be_computed_or_has_no_room(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "ARRIVING", 1)  # all blocks may be promised at once
    pair = Pair(load(checkpoint), load(checkpoint))
    pair.ship(PROMPT)
    pair.clock.now += MAX_S + 1
    pair.canary.yield_blocks()
    assert not pair.canary
    pair.finish()
    pair.ship(PROMPT[1:])
    pair.runner.compute_logits = None  # type: ignore[assignment, method-assign]
    pair.finish()
    pair.look()
    ways = [pair.reserve([number] * 110) for number in range(3)]
    pair.land(*ways[0])
    assert not pair.canary
    assert [found.outcome for found in pair.decode.events if isinstance(found, CanaryChecked)] == ["dropped"] * 3


def test_a_device_that_is_lost_meanwhile_is_told(checkpoint: Path) -> None:
    pair = Pair(load(checkpoint), load(checkpoint))

    def lost(*given: object) -> torch.Tensor:
        raise DeviceLost("injected")

    pair.runner.compute_logits = lost  # type: ignore[method-assign, assignment]
    pair.ship(PROMPT)
    pair.finish()
    with pytest.raises(DeviceLost, match="injected"):
        pair.look()


def test_a_loop_looks_while_nobody_is_here_and_stops_at_once_for_whoever_comes(checkpoint: Path) -> None:
    pair = Pair(load(checkpoint), load(checkpoint))
    pair.clock.now = 0.0
    begun, found = threading.Event(), []
    look = pair.runner.compute_logits

    def slow(
        token_ids: Sequence[int], part: Part, rows: int, keep_going: KeepGoing = always, states: object = None
    ) -> torch.Tensor:
        begun.set()
        while first and keep_going():
            time.sleep(0.001)
        if first:
            first.clear()
            raise ForwardAbandoned
        return look(token_ids, part, rows, keep_going)

    first = [True]
    pair.runner.compute_logits = slow  # type: ignore[method-assign]
    pair.ship(PROMPT)
    loop = EngineLoop(pair.decode, found.extend)
    loop.start()
    try:
        assert begun.wait(5)
        came = threading.Event()
        loop.submit(lambda engine: came.set())
        assert came.wait(1), "it waited for the canary"
        wait_for(lambda: any(isinstance(event, CanaryChecked) for event in found), 5)
        assert loop.load.active_blocks == 0
    finally:
        loop.stop()
    assert [event.outcome for event in found if isinstance(event, CanaryChecked)] == ["agreed"]
    pair.decode.check_integrity()
