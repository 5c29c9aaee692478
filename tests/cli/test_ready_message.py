"""What is shown once a cluster serves."""

from __future__ import annotations

import json
import shlex
from types import SimpleNamespace
from typing import cast

from kvferry.cli.child import Child
from kvferry.cli.ready_message import overview, ready_line, stop_line


def process(name: str, pid: int, url: str | None, facts: dict[str, str], address: str = "") -> Child:
    command = SimpleNamespace(address=address)
    return cast(Child, SimpleNamespace(name=name, pid=pid, url=url, facts=facts, command=command))


def test_each_process_has_a_line_with_what_it_reported():
    facts = {"device": "cuda:1", "kv_pool": "9.50 GiB, 1000 tokens", "link": "127.0.0.1:7"}
    children = [
        process("valkey", 1, None, {}, address="redis://h:3"),
        process("router", 22, "http://h:1", {}),
        process("decode-0", 333, "http://127.0.0.1:2", facts),
    ]
    assert overview(children) == [
        "          pid  address             computes on  KV pool                link",
        "valkey    1    redis://h:3",
        "router    22   http://h:1",
        "decode-0  333  http://127.0.0.1:2  cuda:1       9.50 GiB, 1000 tokens  127.0.0.1:7",
    ]


def test_models_are_told_where_there_are_several():
    def nodes(*models: str) -> list[Child]:
        return [process(f"decode-{i}", i, "u", {"model": model}) for i, model in enumerate(models)]

    assert "model" not in overview(nodes("m", "m"))[0]
    assert overview(nodes("m", "n"))[2].split() == ["decode-1", "1", "u", "n"]


def test_the_ready_line_of_a_model_of_speech_sends_a_file():
    line = ready_line("http://127.0.0.1:1", "whisper", "key", speech=True)
    words = shlex.split(line.partition(" - try: ")[2])
    assert words[:2] == ["curl", "http://127.0.0.1:1/v1/audio/transcriptions"]
    assert words[-4:] == ["-F", "model=whisper", "-F", "file=@speech.wav"]


def test_the_ready_line_is_a_command_to_paste():
    line = ready_line("http://127.0.0.1:1", "it's", "key")
    assert "\n" not in line
    words = shlex.split(line.split(" - try: ")[1])
    assert json.loads(words[-1])["model"] == "it's"
    assert "Authorization: Bearer YOUR_API_KEY" in words


def test_the_last_line_says_how_to_stop():
    assert stop_line(7) == "Ctrl-C stops it (elsewhere: kill 7)"
