"""What grammars cost: compiling schemas, masks of single tokens, and decode steps with and without them.

    python -m benchmarks.grammars [--steps 60] [--rounds 5]

Steps are of the demo model on this machine, at batch 1 and 32, under a schema that goes on; steps with and without it
alternate, and the medians are compared. The limit that kvferry sets itself is 10 % of a step.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence

import numpy as np

from engine.engine import Engine
from engine.events import Failed
from grammars.library import Library
from grammars.seam import words_for
from grammars.vocabulary import Vocabulary
from model_files.source import read_facts, resolve
from model_files.tokenizer import load_tokenizer
from node.assembly import assemble
from protocol.messages import Job
from protocol.sampling import SamplingParams
from protocol.settings import WorkerSettings
from protocol.work import Generate, Grammar

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
    """In Markdown."""
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
    """Compile and walk each schema by chance."""
    source = resolve("smollm2", weights=False)
    tokenizer, facts = load_tokenizer(source), read_facts(source)
    began = time.perf_counter()
    library = Library(
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
    """Decode steps with and without a grammar, in turns."""
    settings = WorkerSettings(role="decode", kv_cache_gib=1.0, max_num_seqs=max(BATCHES))
    engine = assemble(settings).engine
    rows = []
    for batch in BATCHES:
        took: dict[bool, list[float]] = {False: [], True: []}
        for number in range(rounds):
            for bound in (False, True) if number % 2 else (True, False):
                took[bound] += decode(engine, batch, count, bound, number)
        free, masked = (statistics.median(took[bound]) * 1e3 for bound in (False, True))
        rows.append([str(batch), f"{free:.2f}", f"{masked:.2f}", f"{100 * (masked / free - 1):+.1f} %"])
    print(table(["batch", "step, ms", "with a grammar", "cost"], rows))


def decode(engine: Engine, batch: int, count: int, bound: bool, number: int) -> list[float]:
    """Seconds of each step once all streams run."""
    grammar = Grammar("json_schema", json.dumps(SCHEMAS["people"])) if bound else None
    names = [f"{batch}-{number}-{bound}-{i}" for i in range(batch)]
    for i, name in enumerate(names):
        params = SamplingParams(max_tokens=count + 80, temperature=1.0, seed=i, eos_token_ids=(2,), ignore_eos=True)
        engine.add(Job(name, 0, (10 + i, 20, 30, 40), 4, Generate(params, grammar), "bench"))
    while len(engine.roster.running) < batch or not all(r.output_len for r in engine.roster.running):
        engine.step() or time.sleep(0.001)
    times: list[float] = []
    for _ in range(count):
        began = time.perf_counter()
        while not engine.step():
            time.sleep(0.0005)
        times.append(time.perf_counter() - began)
    failed = [event.error.message for event in engine.events if isinstance(event, Failed)]
    assert not failed, failed
    for name in names:
        engine.cancel(name, 0)
    engine.events.clear()
    return times


if __name__ == "__main__":
    main()
