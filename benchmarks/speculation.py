"""Measures output tokens per second with `--num-speculative-tokens` and without, on one engine.

    python -m benchmarks.speculation [--model smollm2 --quantization none --most 8 --rounds 3 --streams 1 8]
    python -m benchmarks.speculation --speculative-model smollm2 --deeper 4

Texts: a copy of prose and of code (typical for extraction, quoting and edits), and free text drawn at temperature 1,
with few repetitions. Prompts are cached; figures are medians of the rounds. Both ways must make the same tokens, or the
benchmark ends with an error. With --right drafts are the text itself, each token right with that probability: random
weights repeat nothing of their prompt. With --deeper the model is the demo model made deeper (benchmarks/deeper.py),
and the demo model drafts for it."""

from __future__ import annotations

import argparse
import inspect
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import models, workloads
from benchmarks.deeper import deepen
from benchmarks.table import markdown
from kvferry.cli.bootstrap import set_threads
from kvferry.engine.engine import Engine
from kvferry.engine.events import Generated, Stepped
from kvferry.engine.ngram_drafts import CLASSES, NgramDrafts
from kvferry.engine.request import Request
from kvferry.protocol.messages import Job
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.settings import RouterSettings, WorkerSettings
from kvferry.protocol.work import Generate
from kvferry.router.text.loader import load_text_model
from kvferry.runtime.limits import available_cores
from kvferry.worker.engine_factory import assemble

PROSE = Path(__file__).with_name("prose.txt").read_text()
CODE = inspect.getsource(workloads)
SOURCE_CHARS = 2000
TEXTS = {
    "copy of prose": (f"Text:\n{PROSE[:SOURCE_CHARS]}\n\nThe same text once more:\n{PROSE[:80]}", 0.0),
    "copy of code": (f"```python\n{CODE[:SOURCE_CHARS]}\n```\nThe same code once more:\n```python\n{CODE[:80]}", 0.0),
    "free text": (PROSE[-600:], 1.0),
    "free text, greedy": (PROSE[-600:], 0.0),
}


class KnownText(NgramDrafts):
    """Drafts of the text that follows, which is known; each of them is right with a probability."""

    def __init__(self, request: Request, text: Sequence[int], right: float) -> None:
        super().__init__(request.token_ids)
        self._class = len(CLASSES)  # of the longest matches
        self._begin, self._text, self._right = len(request.token_ids), text, right

    def propose(self, most: int) -> None:
        at = len(self._token_ids) - self._begin
        numbers = random.Random(at)
        self.found = tuple(
            token if numbers.random() < self._right else token + 1 for token in self._text[at : at + most]
        )


class Bench:
    """Engine and the jobs that it runs. right: see `KnownText`; 0: drafts are found by lookups."""

    def __init__(self, engine: Engine, most: int, output: int, right: float = 0.0) -> None:
        self._engine, self._speculation, self._max_drafts = engine, engine.stepper._speculation, most
        self._output, self._right = output, right
        self._texts: dict[tuple[int, ...], dict[str, list[int]]] = {}
        self._runs = 0

    def run(self, prompt: Sequence[int], temperature: float, streams: int, speculates: bool) -> Run:
        """Run streams of equal prompts, each with a seed of its own."""
        self._runs += 1
        self._speculation._max_drafts = self._max_drafts if speculates else 0
        engine = self._engine
        for number in range(streams):
            params = SamplingParams(max_tokens=self._output, temperature=temperature, seed=number, ignore_eos=True)
            name = f"{self._runs}-{number}"
            engine.add(Job(name, 0, tuple(prompt), len(prompt), Generate(params), "bench"))
        while any(not request.output_here for request in engine.request_table):
            engine.step()
        if self._right and speculates:
            for request in engine.request_table:
                text = self._texts[request.job.token_ids][request.key[0].partition("-")[2]]
                request.drafts = KnownText(request, text, self._right)
        began, engine.events[:] = time.perf_counter(), []
        while engine.has_work():
            engine.step()
        run = Run(time.perf_counter() - began, engine)
        self._texts[tuple(prompt)] = run.texts
        return run


class Run:
    """Seconds, texts by stream, tokens, drafts and accepted drafts of a run."""

    def __init__(self, seconds: float, engine: Engine) -> None:
        texts = defaultdict[str, list[int]](list)
        steps = [event for event in engine.events if isinstance(event, Stepped)]
        for event in engine.events:
            if isinstance(event, Generated):
                texts[event.key[0].partition("-")[2]] += event.delta.token_ids
        self.seconds, self.texts = seconds, dict(texts)
        self.tokens = sum(step.decode_tokens for step in steps)
        self.drafted, self.accepted = sum(step.drafted for step in steps), sum(step.accepted for step in steps)


def compare(bench: Bench, prompt: Sequence[int], temperature: float, streams: int, rounds: int) -> tuple[str, ...]:
    """Return a row of the table; the first round does not count."""
    taken: dict[bool, list[Run]] = {False: [], True: []}
    for number in range(rounds + 1):
        for speculates in (True, False) if number % 2 else (False, True):
            taken[speculates].append(bench.run(prompt, temperature, streams, speculates))
    if any(run.texts != taken[False][0].texts for runs in taken.values() for run in runs):
        raise RuntimeError("speculation changed a text")
    without, with_ = (statistics.median(run.tokens / run.seconds for run in taken[way][1:]) for way in (False, True))
    ratio = statistics.median(a.seconds / b.seconds for a, b in zip(taken[False][1:], taken[True][1:], strict=True))
    last = taken[True][-1]
    share = f"{100 * last.accepted / last.drafted:.0f} % of {last.drafted}" if last.drafted else "-"
    return f"{without:.0f}", f"{with_:.0f}", f"{ratio:.2f}", share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--speculative-model", default="", help="what drafts beside lookups")
    parser.add_argument(
        "--deeper", type=int, default=0, help="use the demo model with this many times its layers instead"
    )
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--right", type=float, default=0.0, help="share of right drafts, of texts known beforehand")
    parser.add_argument("--most", type=int, default=8, help="drafts of a stream in a step")
    parser.add_argument("--output", type=int, default=256, help="tokens of a text")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=list(TEXTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=available_cores())
    options = parser.parse_args()
    set_threads(options.threads)
    torch.set_num_threads(options.threads)
    if options.deeper:
        plain = models.find_models([], None, None, vllm=True)[models.SAFETENSORS]
        options.model = str(deepen(plain, plain.with_name(f"{plain.name}-deeper-{options.deeper}"), options.deeper))
    text = load_text_model(RouterSettings(model=(options.model,)))
    settings = WorkerSettings(
        model=options.model, dtype="bfloat16", quantization=options.quantization, threads=options.threads,
        kv_cache_gib=0.25, num_speculative_tokens=options.most, speculative_model=options.speculative_model,
    )  # fmt: skip
    bench = Bench(assemble(settings).engine, options.most, options.output, options.right)
    rows = []
    for streams in options.streams:
        for name in options.texts:
            prompt, temperature = TEXTS[name]
            found = compare(bench, text.encode(prompt), temperature, streams, options.rounds)
            rows.append((name, str(streams), *found))
            print(*rows[-1], flush=True)
    print(markdown(("text", "streams", "tokens/s", f"with {options.most} drafts", "ratio", "drafts right"), rows))


if __name__ == "__main__":
    main()
