"""The chat page over `serve --routers 2`: the router process that holds an answer dies, and the answer is whole."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.browser import CHROMIUM, browser
from tests.cluster.tiny_checkpoints import save_checkpoint
from tests.local_cluster import MODEL, local_cluster
from tests.resumed_streams import free_pair
from tests.router.page.chat_tab import BROKEN, ENDED, FACTS, SHOWN, ask, opened, set_fields
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH")]
QUESTION = "Tell me a long story about a river."
TOKENS = 400
"""Tokens of an answer: two seconds of paced steps."""
STEP_S = 0.005
"""Seconds that a step lasts at least."""
EXACT = ("--batch-invariant", "--dtype", "bfloat16", "--threads", "1", "--kv-blocks", "1000")
"""Options of nodes: other sums would decide near ties otherwise."""


def test_the_page_reconnects_when_its_router_is_killed(tmp_path: Path) -> None:
    """No gateway stands between: the page asks the same address until a router listens there again."""
    path = save_checkpoint(tmp_path, "LlamaConfig", num_attention_heads=2, max_position_embeddings=2048)
    port = free_pair()
    words = ("--routers", "2", "--port", str(port), "--model", str(path), "--served-model-name", MODEL, *EXACT)
    body = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    with local_cluster(*words, step_s=STEP_S) as cluster, browser(tmp_path / "profile") as page:
        url = f"http://127.0.0.1:{port + 1}"
        wait_for(lambda: httpx.get(f"{url}/ready?nodes=1", timeout=2).status_code == 200, 60)
        (process,) = (each for each in cluster.children("router") if str(port + 1) in each.cmdline())
        opened(page, url)
        set_fields(page, temperature="0", max_tokens=str(TOKENS), more='{"ignore_eos": true}')
        ask(page, QUESTION)
        page.wait("chat.current.turns[1]?.text.length > 40")
        process.kill()
        page.wait(f"{SHOWN}.length")
        assert page.evaluate(SHOWN) == BROKEN
        page.wait(ENDED, 60)
        turn, facts = page.evaluate("chat.current.turns[1]"), page.evaluate(FACTS)
        messages = [{"role": "user", "content": QUESTION}]
        whole = httpx.post(f"{cluster.url}/v1/chat/completions", json={**body, "messages": messages}, timeout=60).json()
        cluster.settle()
    assert "error" not in turn
    assert turn["usage"]["completion_tokens"] == TOKENS
    assert turn["text"] == whole["choices"][0]["message"]["content"]
    assert "1 reconnect" in facts
