"""The demo model on a bare engine, answering under JSON schemas, many at a time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.engine.engine import Engine
from kvferry.engine.events import Failed, Generated
from kvferry.model_files.source import resolve
from kvferry.model_files.tokenizer import load_tokenizer
from kvferry.protocol.messages import Job
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.settings import WorkerSettings
from kvferry.protocol.work import Generate, Grammar
from kvferry.worker.engine_factory import assemble

EOS = (2,)
TOGETHER = 16
MAX_TOKENS = 256
LIMIT_S = 3600.0


@dataclass
class Run:
    """What came of one schema: the text, why it ended, or the error."""

    number: int
    schema: Any
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    error: str | None = None


class SchemaRuns:
    """One engine, loaded once."""

    def __init__(self) -> None:
        settings = WorkerSettings(role="decode", kv_cache_gib=0.5, max_num_seqs=TOGETHER)
        self.engine: Engine = assemble(settings).engine
        self.tokenizer = load_tokenizer(resolve("smollm2", weights=False))

    def __call__(self, schemas: Sequence[Any], temperature: float = 1.0) -> Iterator[Run]:
        """Answers in the order in which they end."""
        waiting = [Run(number, schema) for number, schema in enumerate(schemas)]
        waiting.reverse()
        under_way: dict[str, Run] = {}
        deadline = time.monotonic() + LIMIT_S
        while waiting or under_way:
            assert time.monotonic() < deadline
            while waiting and len(under_way) < TOGETHER:
                run = waiting.pop()
                under_way[f"s{run.number}"] = run
                self.engine.add(self._job(run, temperature))
            if not (self.engine.has_work() and self.engine.step()):
                time.sleep(0.001)  # grammars are being compiled
            yield from self._ended(under_way)
        self.engine.check_integrity()

    def _ended(self, under_way: dict[str, Run]) -> Iterator[Run]:
        events, self.engine.events[:] = list(self.engine.events), []
        for event in events:
            if isinstance(event, Generated):
                run = under_way[event.key[0]]
                run.token_ids += event.delta.token_ids
                run.finish = event.delta.finish_reason
            elif isinstance(event, Failed):
                run = under_way[event.key[0]]
                run.error = event.error.message
            else:
                continue
            if run.finish or run.error:
                del under_way[event.key[0]]
                run.text = self.tokenizer.decode(run.token_ids)
                yield run

    def _job(self, run: Run, temperature: float) -> Job:
        prompt = (
            f"<|im_start|>user\nSome JSON, please, as {json.dumps(run.schema)[:120]}<|im_end|>\n<|im_start|>assistant\n"
        )
        ids = tuple(self.tokenizer.library.encode(prompt, add_special_tokens=False).ids)
        params = SamplingParams(
            max_tokens=MAX_TOKENS, temperature=temperature, seed=run.number, eos_token_ids=EOS, logprobs=None
        )
        grammar = Grammar("json_schema", json.dumps(run.schema))
        return Job(f"s{run.number}", 0, ids, len(ids), Generate(params, grammar), "tests")
