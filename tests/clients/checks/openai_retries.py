"""The official Python client: its requests under one Idempotency-Key while the router that computes them is killed."""

from __future__ import annotations

import os
import threading
import urllib.error
import urllib.request
import uuid
from importlib import import_module, util

import openai
from harness import MODEL, check, raises

Broken = import_module("httpx2" if util.find_spec("httpx2") else "httpx").TransportError
"""What a stream that breaks raises, by the transport of the client's version."""
URL, CONTROL = os.environ["CHECK_DYING_URL"], os.environ["CHECK_DYING_CONTROL"]
TOKENS, BEFORE = int(os.environ["CHECK_DYING_TOKENS"]), int(os.environ["CHECK_DYING_BEFORE"])
"""Tokens of an answer, and those delivered before the router is killed in the middle of it."""
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "Tell me of a river."}], "max_tokens": TOKENS,
         "temperature": 1.0, "seed": 5, "extra_body": {"ignore_eos": True}}  # fmt: skip


def told(command):
    try:
        return int(urllib.request.urlopen(f"{CONTROL}/{command}", timeout=90).read())
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{command}: {error.read().decode()}") from None


def client():
    """A client without open connections, which are the way to the router that lived."""
    return openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=6, timeout=60)


def key():
    return {"Idempotency-Key": str(uuid.uuid4())}


def killed(command, request):
    """What `request` returns while the router is killed."""
    told("ready")
    killer = threading.Thread(target=told, args=(command,))
    killer.start()
    try:
        return request()
    finally:
        killer.join()


def went_on():
    """The other router computed the rest of one answer, and no more."""
    tokens = told("tokens")
    assert 0 < tokens < TOKENS - BEFORE / 2, tokens
    assert told("takeovers") == 1


def whole(headers, **more):
    answer = client().chat.completions.create(**{**ASKED, **more}, extra_headers=headers)
    return {choice.index: choice.message.content for choice in answer.choices}


def streamed(headers, **more):
    """Texts of a stream's choices; a stream that breaks is asked for again under the same key."""
    for _ in range(6):
        texts = {}
        try:
            for chunk in client().chat.completions.create(**{**ASKED, **more}, stream=True, extra_headers=headers):
                for choice in chunk.choices:
                    texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        except (Broken, openai.APIConnectionError):
            continue
        return texts
    raise AssertionError("every stream broke")


@check
def a_whole_answer_goes_on_at_another_router():
    expected = whole({})
    assert killed("kill", lambda: whole(key())) == expected
    went_on()


@check
def a_stream_goes_on_at_another_router():
    expected = whole({})
    assert killed("kill", lambda: streamed(key())) == expected
    went_on()


@check
def several_choices_go_on():
    expected = whole({}, n=2)
    assert killed("kill", lambda: whole(key(), n=2)) == expected
    assert killed("kill", lambda: streamed(key(), n=2)) == expected


@check
def a_router_that_dies_before_the_first_token_changes_nothing():
    long = {"messages": [{"role": "user", "content": "river " * 150}]}
    expected = whole({}, **long)
    for request in (whole, streamed):
        assert killed("kill_early", lambda request=request: request(key(), **long)) == expected
        assert told("tokens") == TOKENS


@check
def what_has_ended_is_sent_again_and_not_computed():
    told("ready")
    headers = key()
    assert whole(headers) == whole(headers)
    with raises(openai.UnprocessableEntityError) as caught:
        streamed(headers)
    assert caught[0].code == "idempotency_key_reused"
    assert told("tokens") == TOKENS


@check
def a_response_goes_on():
    body = {"model": MODEL, "input": "Tell me of a river.", "max_output_tokens": TOKENS, "temperature": 1.0}
    body["extra_body"] = {"ignore_eos": True, "seed": 5}
    expected = client().responses.create(**body).output_text
    assert killed("kill", lambda: client().responses.create(**body, extra_headers=key()).output_text) == expected
    went_on()
