"""What is shown once a cluster serves."""

from __future__ import annotations

import json
import shlex
from types import SimpleNamespace

from cli.overview import overview, ready_line, stop_line


def test_each_process_has_a_line_with_what_it_reported():
    facts = {"device": "cuda:1", "kv_pool": "9.50 GiB, 1000 tokens", "link": "127.0.0.1:7"}
    children = [
        SimpleNamespace(name="valkey", pid=1, url=None, facts={}),
        SimpleNamespace(name="router", pid=22, url="http://h:1", facts={}),
        SimpleNamespace(name="decode-0", pid=333, url="http://127.0.0.1:2", facts=facts),
    ]
    assert overview(children) == [
        "          pid  address             computes on  KV pool                link",
        "valkey    1",
        "router    22   http://h:1",
        "decode-0  333  http://127.0.0.1:2  cuda:1       9.50 GiB, 1000 tokens  127.0.0.1:7",
    ]


def test_the_ready_line_is_a_command_to_paste():
    line = ready_line("http://127.0.0.1:1", "it's", "key")
    assert "\n" not in line
    words = shlex.split(line.split(" - try: ")[1])
    assert json.loads(words[-1])["model"] == "it's"
    assert "Authorization: Bearer YOUR_API_KEY" in words


def test_the_last_line_says_how_to_stop():
    assert stop_line(7) == "Ctrl-C ends all of it (elsewhere: kill 7)"
