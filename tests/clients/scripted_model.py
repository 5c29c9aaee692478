"""A router whose model says what its prompt dictates, for agents whose long prompts the demo model cannot follow.

Everything but the model is real: routes, templates, tools, limits, streams. A prompt dictates in
`SCRIPT[["first answer", "second answer"]]SCRIPT`; each tool result behind it leads to the next answer."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from kvferry.router.dispatch.interface import Output, RequestSpec
from tests.api_parts import Api, FakeCluster, demo_text, ids_of, outputs_for, served

KEY = "sk-scripted"
"""The key that the router wants."""
CONTEXT = 50_000
"""Context in tokens: Claude Code's prompt has 23,000, and it asks for 32,000 more."""
_SCRIPT = re.compile(r"SCRIPT\[(\[.*?\])\]SCRIPT", re.DOTALL)


def answers(spec: RequestSpec) -> Sequence[Output]:
    """The answer that the prompt's last script has for as many tool results."""
    prompt = demo_text().tokenizer.decode(spec.token_ids, skip_special_tokens=False)
    scripts = list(_SCRIPT.finditer(prompt))
    if not scripts:
        return outputs_for(spec, ids_of("No script."))
    steps = json.loads(scripts[-1][1])
    done = prompt.count("<tool_response>", scripts[-1].end())
    return outputs_for(spec, ids_of(steps[min(done, len(steps) - 1)]))


@contextlib.contextmanager
def scripted_router(data: Path) -> Iterator[str]:
    """Serve the router; yields its base URL."""
    text = demo_text()
    text = replace(text, facts=replace(text.facts, max_model_len=CONTEXT))
    cluster = FakeCluster(answers, max_model_len=CONTEXT)
    with served(Api(cluster, text, data_dir=str(data), api_key=KEY).app) as url:
        yield url
