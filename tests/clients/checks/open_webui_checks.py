"""Open WebUI's own server, headless, with kvferry behind it: chats, tasks, documents, pictures and speech."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from command_line import HOME, KEY, SCRIPTED, call, clear, script
from harness import MODEL, check, raises

START_S = 150.0
"""Longest start of the server, in seconds: it fills its database first."""
PORT = int(os.environ["CHECK_FREE_PORT"])
SEEING, HEARING = os.environ["CHECK_SEEING_MODEL"], os.environ["CHECK_HEARING_MODEL"]
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time.", "parameters": {
    "type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}}}  # fmt: skip
_token = ""


def start():
    """Serve without accounts; ended with the checks' own process."""
    clear()
    api, heard = f"{SCRIPTED}/v1", f"{os.environ['CHECK_SEEING_URL']}/v1"
    env = {
        "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}", "HOME": str(HOME / "home"),
        "DATA_DIR": str(HOME / "home" / "data"), "WEBUI_AUTH": "False", "WEBUI_SECRET_KEY": "x",
        "ENABLE_OLLAMA_API": "False", "OPENAI_API_BASE_URLS": f"{api};{heard}", "OPENAI_API_KEYS": f"{KEY};none",
        "ENABLE_FORWARD_USER_INFO_HEADERS": "True", "RAG_EMBEDDING_ENGINE": "openai", "RAG_EMBEDDING_MODEL": MODEL,
        "RAG_OPENAI_API_BASE_URL": api, "RAG_OPENAI_API_KEY": KEY, "AUDIO_STT_ENGINE": "openai",
        "AUDIO_STT_OPENAI_API_BASE_URL": heard, "AUDIO_STT_OPENAI_API_KEY": "none", "AUDIO_STT_MODEL": HEARING,
        "HF_HUB_OFFLINE": "1", "OFFLINE_MODE": "True", "ANONYMIZED_TELEMETRY": "false",
    }  # fmt: skip
    log = (HOME / "home" / "log").open("wb")
    argv = [shutil.which("open-webui", path=env["PATH"]) or "open-webui", "serve", "--port", str(PORT)]
    return subprocess.Popen([*argv, "--host", "127.0.0.1"], env=env, cwd=HOME / "home", stdout=log, stderr=log)


def asked(path, body=None, kind="application/json"):
    """The text of an answer."""
    headers = {"content-type": kind, **({"authorization": f"Bearer {_token}"} if _token else {})}
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data, headers)
    try:
        return urllib.request.urlopen(request, timeout=40).read().decode()
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{path}: {error.code} {error.read().decode()[:400]}") from None


def chat(content, **more):
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "stream": False, **more}
    return asked("/api/chat/completions", body)


def message(content, **more):
    return json.loads(chat(content, **more))["choices"][0]["message"]


def task(name, told):
    """What the task makes of a chat whose user dictates the answer."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": script(told)}], "chat_id": "one", "prompt": "x"}
    answer = json.loads(asked(f"/api/v1/tasks/{name}/completions", body))
    return answer["choices"][0]["message"]["content"]


@check
def it_starts_and_signs_in():
    global _token
    until = time.monotonic() + START_S
    while True:
        try:
            asked("/health")
            break
        except OSError:
            assert server.poll() is None, (HOME / "home" / "log").read_text()[-600:]
            assert time.monotonic() < until
            time.sleep(0.5)
    _token = json.loads(asked("/api/v1/auths/signin", {"email": "", "password": ""}))["token"]


@check
def both_connections_list_their_models():
    found = {each["id"] for each in json.loads(asked("/api/models"))["data"]}
    assert {MODEL, SEEING} <= found, found


@check
def a_chat_is_streamed_with_its_usage():
    lines = chat(script("One two three."), stream=True, stream_options={"include_usage": True}).splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    texts = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    assert "".join(texts) == "One two three."
    assert events[-1]["usage"]["completion_tokens"] > 0


@check
def a_tool_is_called_and_its_result_read():
    asking = script(call("clock", zone="UTC"), "It is noon.")
    called = message(asking, tools=[CLOCK])["tool_calls"][0]
    assert json.loads(called["function"]["arguments"]) == {"zone": "UTC"}
    history = [
        {"role": "user", "content": asking},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": called["id"], "content": [{"type": "text", "text": "noon"}]},
    ]
    assert message("", messages=history, tools=[CLOCK])["content"] == "It is noon."


@check
def titles_tags_and_questions_are_made_in_the_background():
    wanted = {"title": {"title": "Sky"}, "tags": {"tags": ["sky"]}, "follow_up": {"follow_ups": ["Why?"]}}
    for name, told in {**wanted, "queries": {"queries": ["sky"]}}.items():
        assert json.loads(task(name, json.dumps(told))) == told


@check
def a_document_is_embedded():
    body = {"name": "ferry", "content": "A ferry between two islands. " * 40, "collection_name": "ferries"}
    assert json.loads(asked("/api/v1/retrieval/process/text", body))["status"]
    found = json.loads(asked("/api/v1/retrieval/query/collection", {"collection_names": ["ferries"], "query": "boat"}))
    assert "ferry" in json.dumps(found)


@check
def pictures_reach_the_model():
    def prompt_tokens(urls):
        parts = [{"type": "text", "text": "What?"}, *({"type": "image_url", "image_url": {"url": url}} for url in urls)]
        return json.loads(chat(parts, model=SEEING, max_tokens=8))["usage"]["prompt_tokens"]

    assert prompt_tokens([]) < prompt_tokens(json.loads(os.environ["CHECK_PICTURES"]))


def transcribed():
    sound = base64.b64decode(os.environ["CHECK_SOUND"])
    head = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\ncontent-type: audio/wav\r\n\r\n'
    kind = "multipart/form-data; boundary=x"
    return json.loads(asked("/api/v1/audio/transcriptions", head + sound + b"\r\n--x--\r\n", kind))["text"]


@check
def speech_is_transcribed():
    assert transcribed()


@check
def speech_that_is_sent_as_json_is_transcribed():
    config = json.loads(asked("/api/v1/audio/config"))
    config["stt"]["OPENAI_API_REQUEST_FORMAT"] = "json"
    asked("/api/v1/audio/config/update", config)
    assert transcribed()


@check
def an_error_reaches_the_user():
    with raises(AssertionError) as caught:
        chat("7" * 100_000)
    assert "context length" in str(caught[0])


@check
def it_ends():
    server.terminate()
    server.wait(30)


server = start()
