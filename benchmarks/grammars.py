"""Measures what grammars cost: compiling schemas, masks of single tokens, and decode steps with and without them.

    python -m benchmarks.grammars [--steps 60] [--rounds 5]

Steps are of the demo model on this machine, at batch 1 and 32, under a schema that never ends. Steps with and without
it alternate, and medians and means are compared. The project's own limit is 10 % of a step."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvferry.engine.engine import Engine
from kvferry.engine.events import Failed, Generated
from kvferry.model_files.source import read_facts, resolve
from kvferry.model_files.tokenizer import load_tokenizer
from kvferry.protocol.messages import Job
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.settings import WorkerSettings
from kvferry.protocol.work import Generate, Grammar
from kvferry.structured_output.interface import words_for
from kvferry.structured_output.llguidance_backend import LlguidanceBackend
from kvferry.structured_output.vocabulary import Vocabulary
from kvferry.worker.engine_factory import assemble

BATCHES = (1, 32)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["new", "paid", "late"]}, "maxItems": 4},
    },
    "required": ["name", "age", "email", "tags"],
    "additionalProperties": False,
}
SCHEMAS = {
    "any object": {"type": "object"},
    "person": PERSON,
    "people": {"type": "array", "items": PERSON, "minItems": 100},
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {"node": {"type": "object", "properties": {"v": {"type": "string"}, "c": {"type": "array", "items": {
            "$ref": "#/$defs/node"}}}, "required": ["v", "c"], "additionalProperties": False}},
    },
    "40 properties": {
        "type": "object", "properties": {f"field_{i}": {"type": ["string", "null"]} for i in range(40)},
        "required": [f"field_{i}" for i in range(0, 40, 2)], "additionalProperties": False,
    },
    "enum of 500": {"type": "array", "items": {"enum": [f"city number {i}" for i in range(500)]}},
}  # fmt: skip


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    single_masks()
    steps(options.steps, options.rounds)


def single_masks() -> None:
    """Compile each schema and walk it at random."""
    source = resolve("smollm2", weights=False)
    tokenizer, facts = load_tokenizer(source), read_facts(source)
    began = time.perf_counter()
    library = LlguidanceBackend(
        Vocabulary(tokenizer.library.to_str(), facts.vocab_size, facts.eos_token_ids, tokenizer.special_texts)
    )
    print(f"tokenizer read in {time.perf_counter() - began:.2f} s\n")
    rows = []
    for name, schema in SCHEMAS.items():
        began = time.perf_counter()
        matcher = library.compile(Grammar("json_schema", json.dumps(schema)))
        compiled = time.perf_counter() - began
        bits, chance, masks = np.zeros(words_for(facts.vocab_size), np.int32), random.Random(0), []
        for _ in range(400):
            began = time.perf_counter()
            matcher.mask(bits)
            masks.append(time.perf_counter() - began)
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little", count=facts.vocab_size))
            going_on = [int(token) for token in allowed if token not in facts.eos_token_ids]
            if not going_on:
                break
            matcher.accept([chance.choice(going_on)])
        p50, p99 = np.percentile(masks, (50, 99)) * 1e6
        rows.append([name, f"{compiled * 1e3:.1f}", f"{p50:.0f}", f"{p99:.0f}", str(len(masks))])
    print(table(["schema", "compile, ms", "mask p50, µs", "p99, µs", "tokens"], rows), "\n")


def steps(count: int, rounds: int) -> None:
    """Time decode steps with and without a grammar, in turns, and the parts of the difference."""
    settings = WorkerSettings(role="decode", kv_cache_gib=1.0, max_num_seqs=max(BATCHES))
    engine = assemble(settings).engine
    clock = Clock(engine)
    rows, parts = [], []
    for batch in BATCHES:
        took: dict[bool, list[float]] = {False: [], True: []}
        tokens = {False: 0, True: 0}
        spent: dict[bool, defaultdict[str, float]] = {False: defaultdict(float), True: defaultdict(float)}
        for number in range(rounds):
            for bound in (False, True) if number % 2 else (True, False):
                times, drawn = decode(engine, batch, count, bound, number, clock.spent.clear)
                took[bound] += times
                tokens[bound] += drawn
                for part, seconds in clock.spent.items():
                    spent[bound][part] += seconds
        free, masked = ([statistics.median(took[bound]) * 1e3, statistics.fmean(took[bound]) * 1e3] for bound in took)
        cost = [f"{100 * (with_one / without - 1):+.1f} %" for with_one, without in zip(masked, free, strict=True)]
        rows.append(
            [str(batch), f"{free[0]:.2f}", f"{masked[0]:.2f}", *cost, f"{100 * tokens[True] / tokens[False]:.1f} %"]
        )
        each = {name: (spent[True][name] - spent[False][name]) / len(took[True]) * 1e3 for name in clock.parts}
        parts.append([str(batch), *(f"{value:.3f}" for value in each.values())])
    titles = ["batch", "step, ms", "with a grammar", "cost", "of the mean", "tokens drawn"]
    print(table(titles, rows), "\n\nwhat a step has more with a grammar, ms:\n")
    print(table(["batch", *clock.parts], parts))


class Clock:
    """Seconds that an engine spends on grammars, by part."""

    parts = ("library", "masks beside it", "drawing")

    def __init__(self, engine: Engine) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        compiler = engine.runner.masks._compiler
        assert compiler is not None
        matcher = type(compiler.compile(Grammar("json_object", "")))
        for owner, name, part in (
            (matcher, "mask", "library"),
            (matcher, "accept", "library"),
            (engine.runner.masks, "settle", "settle"),
            (engine.runner.masks, "advance", "advance"),
            (engine.runner.model.ops, "draw", "drawing"),
        ):
            self._time(owner, name, part)

    def _time(self, owner: object, name: str, part: str) -> None:
        inner = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            began, library = time.perf_counter(), self.spent["library"]
            result = inner(*arguments)
            seconds = time.perf_counter() - began
            if part in ("settle", "advance"):
                self.spent["masks beside it"] += seconds - (self.spent["library"] - library)
            else:
                self.spent[part] += seconds
            return result

        setattr(owner, name, timed)


def decode(
    engine: Engine, batch: int, count: int, bound: bool, number: int, begin: Callable[[], None]
) -> tuple[list[float], int]:
    """Return the seconds of each step once all streams run, and the tokens of these steps.

    begin: called before the first of them."""
    grammar = Grammar("json_schema", json.dumps(SCHEMAS["people"])) if bound else None
    names = [f"{batch}-{number}-{bound}-{i}" for i in range(batch)]
    for i, name in enumerate(names):
        params = SamplingParams(max_tokens=count + 80, temperature=1.0, seed=i, eos_token_ids=(2,), ignore_eos=True)
        engine.add(Job(name, 0, (10 + i, 20, 30, 40), 4, Generate(params, grammar), "bench"))
    while len(engine.request_table.running) < batch or not all(r.output_len for r in engine.request_table.running):
        if not engine.step():
            time.sleep(0.001)
    times: list[float] = []
    before = len(engine.events)
    begin()
    for _ in range(count):
        began = time.perf_counter()
        while not engine.step():
            time.sleep(0.0005)
        times.append(time.perf_counter() - began)
    failed = [event.error.message for event in engine.events if isinstance(event, Failed)]
    assert not failed, failed
    for name in names:
        engine.cancel(name, 0)
    drawn = sum(isinstance(event, Generated) for event in engine.events[before:])
    engine.events.clear()
    return times, drawn


if __name__ == "__main__":
    main()
