"""Anthropic's client: images in messages and in results of tools."""

from __future__ import annotations

import json
import os

import anthropic
from harness import check, raises

MODEL, PICTURES = os.environ["CHECK_SEEING_MODEL"], json.loads(os.environ["CHECK_PICTURES"])
client = anthropic.Anthropic(base_url=os.environ["CHECK_SEEING_URL"], api_key="none", max_retries=0, timeout=60)
LOOK = {"name": "look", "description": "a picture", "input_schema": {"type": "object", "properties": {}}}


def block(url):
    data = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    return {"type": "image", "source": data}


def ask(*blocks, **more):
    content = [*blocks, {"type": "text", "text": "What is it?"}]
    return create([{"role": "user", "content": content}], **more)


def create(messages, **more):
    return client.messages.create(model=MODEL, max_tokens=8, messages=messages, extra_body={"temperature": 0}, **more)


@check
def images_are_seen():
    answers = [ask(), ask(block(PICTURES[0])), ask(block(PICTURES[1])), ask(block(PICTURES[0]))]
    plain, one, other, again = (answer.content[0].text for answer in answers)
    assert len({plain, one, other}) == 3
    assert one == again
    assert answers[0].usage.input_tokens < answers[1].usage.input_tokens


@check
def images_are_seen_in_streams():
    content = [block(PICTURES[0]), {"type": "text", "text": "What is it?"}]
    with client.messages.stream(
        model=MODEL, max_tokens=8, messages=[{"role": "user", "content": content}], extra_body={"temperature": 0}
    ) as stream:
        assert "".join(stream.text_stream) == ask(block(PICTURES[0])).content[0].text


@check
def images_of_tools_are_seen():
    def after(content):
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content}
        return create([
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}]},
            {"role": "user", "content": [result]},
        ])  # fmt: skip

    seen = [after([{"type": "text", "text": "here"}, block(each)]).content[0].text for each in PICTURES]
    assert len(set(seen)) == 2


@check
def their_tokens_are_counted():
    messages = [{"role": "user", "content": [block(PICTURES[0]), {"type": "text", "text": "What is it?"}]}]
    counted = client.messages.count_tokens(model=MODEL, messages=messages).input_tokens
    usage = create(messages).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0) + (
        usage.cache_creation_input_tokens or 0
    )


@check
def what_is_wrong_is_named():
    with raises(anthropic.BadRequestError) as caught:
        ask(block(PICTURES[0][:-3]))
    assert "messages[0].content[0].source.data is not valid base64" in str(caught[0])
