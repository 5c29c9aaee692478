"""How many files one must read to follow a request from its arrival to its dispatch."""

from __future__ import annotations

from typing import Any

import httpx

from kvferry.protocol.messages import PrefillRequest
from tests.api_parts import app_of, demo_text
from tests.fake_workers import Answer, Bench, FakeWorker, decode, honest_prefill, prefill
from tests.walk import Walk

API_HALF = {
    "router/api/bodies/fields.py",
    "router/api/ingress.py",
    "router/api/path_aliases.py",
    "router/api/generating_route.py",
    "router/api/inference_route.py",
    "router/api/bodies/reader.py",
    "router/api/bodies/generating.py",
    "router/api/bodies/structured.py",
    "router/api/bodies/session_fields.py",
    "router/api/served_models.py",
    "router/api/generation.py",
    "router/api/sequence_stream.py",
    "router/api/admission.py",
    "router/text/encoding.py",
    "router/text/word_cache.py",
    "router/dispatch/model_cluster.py",
}
"""Key and call; its turn to begin; admission; bytes; what the body asks for; its model; its sequences, and one of them;
its limits and turn; its prompt, within bounds, word by word; the nodes."""
RENDERING = {
    f"router/text/{name}.py"
    for name in (
        "text_model",
        "renderer",
        "rendering",
        "render_frames",
        "template",
        "cheap_templates",
        "cheap_costs",
        "message_shaping",
        "template_traits",
        "call_ids",
        "adaptations",
        "thinking_variables",
    )
}
"""A chat's messages as its template expects them; the template, here or in a process of its own, whose operations are
charged."""
MESSAGES = {"router/api/bodies/chat_prompt.py", "router/api/bodies/reasoning.py"}
TENANTS = {
    f"router/tenants/{name}.py"
    for name in (
        "tenant_registry",
        "keyring",
        "limits",
        "tenant",
        "scheduler_slots",
        "fair_queue",
        "arrival_rate",
        "tenant_queue",
    )
}
WORDS = "What does a ferry carry? " * 10
CHAT = {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 4}


async def walked(path: str, body: dict[str, Any]) -> set[str]:
    """Files that a request runs through before its POST to the prefill node, after one that opened connections."""
    walk = Walk("router", "placement")

    async def arrived(worker: FakeWorker, request: PrefillRequest) -> Answer:
        walk.stop()
        async for answer in honest_prefill(worker, request):
            yield answer

    async with Bench([prefill(prefill_script=arrived), decode()]) as bench:
        app = app_of(bench.cluster, demo_text(), bench.metrics)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as http:
            assert (await http.post(path, json={**body, "seed": 1})).status_code == 200
            with walk:
                assert (await http.post(path, json={**body, "seed": 2})).status_code == 200
    assert "router/dispatch/dispatch.py" in walk.files
    assert {file for file in walk.files if file.startswith("router/tenants/")} <= TENANTS
    assert len(set(walk.files) - TENANTS) <= 61, sorted(set(walk.files) - TENANTS)
    return {
        file for file in walk.files if file.startswith(("router/api/", "router/text/", "router/dispatch/model_cluster"))
    }


async def test_a_chat_walks_through_few_files_before_its_dispatch() -> None:
    assert await walked("/v1/chat/completions", CHAT) == {*API_HALF, *RENDERING, *MESSAGES}


async def test_a_completion_walks_the_same_way_and_reads_its_prompts() -> None:
    assert await walked("/v1/completions", {"prompt": WORDS}) == {*API_HALF, "router/api/bodies/completions.py"}
