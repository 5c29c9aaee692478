"""The walk of a request: which files of the house run between its arrival and the POST to the prefill node.

A newcomer who follows a request reads these files; each one more is a page more to hold in mind.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
from api_parts import demo_text
from fake_workers import Answer, Bench, FakeWorker, decode, honest_prefill, prefill

from protocol.messages import PrefillRequest
from protocol.metrics import RouterMetrics
from protocol.settings import RouterSettings
from router.api.app import create_app

ROOT = Path(__file__).parents[2]
API_HALF = {
    "router/api/door.py",
    "router/api/schemas.py",
    "router/api/pool.py",
    "router/api/generation.py",
    "router/text/text_model.py",
    "router/journey/cluster.py",
}
"""From the socket to the journey: key and body, what it asks for, its model, its prompt, its sequences, the nodes."""
BODY = {"messages": [{"role": "user", "content": "What does a ferry carry? " * 10}], "max_tokens": 4}


class Walk:
    """Files under router/ and placement/ whose functions are called while it is on."""

    def __init__(self) -> None:
        self.files: dict[str, list[str]] = {}

    def begin(self) -> None:
        sys.setprofile(self._note)

    def end(self) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            name = str(path.relative_to(ROOT))
            if name.startswith(("router/", "placement/")):
                self.files.setdefault(name, []).append(frame.f_code.co_name)


async def walked(path: str, body: dict[str, Any]) -> dict[str, list[str]]:
    """The walk of a second request: the first one opens connections."""
    walk = Walk()

    async def ending(worker: FakeWorker, request: PrefillRequest) -> Answer:
        walk.end()
        async for answer in honest_prefill(worker, request):
            yield answer

    node = prefill()
    async with Bench([node, decode()]) as bench:
        app = create_app(RouterSettings(), bench.cluster, demo_text(), RouterMetrics())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as http:
            assert (await http.post(path, json={**body, "seed": 1})).status_code == 200
            node.prefill_script = ending
            walk.begin()
            try:
                assert (await http.post(path, json={**body, "seed": 2})).status_code == 200
            finally:
                walk.end()
    return walk.files


async def test_a_chat_walks_through_six_files_before_its_journey() -> None:
    files = await walked("/v1/chat/completions", BODY)
    assert "_launch" in files["router/journey/journey.py"], "the walk did not reach the journey"
    half = {name for name in files if name.startswith(("router/api/", "router/text/"))} | {"router/journey/cluster.py"}
    assert half == API_HALF, files


async def test_a_completion_walks_the_same_way_and_reads_its_prompt_field() -> None:
    files = await walked("/v1/completions", {"prompt": "Once upon a time " * 10, "max_tokens": 4})
    half = {name for name in files if name.startswith(("router/api/", "router/text/"))}
    assert half == API_HALF - {"router/journey/cluster.py"} | {"router/api/fields.py"}, files
