"""Images in messages of `langchain-openai`, in the API's form and in LangChain's own, over chats and responses."""

from __future__ import annotations

import json
import os

import pytest
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

MODEL, PICTURES = os.environ["CHECK_SEEING_MODEL"], json.loads(os.environ["CHECK_PICTURES"])
FORMS = {
    "url": lambda url: {"type": "image_url", "image_url": {"url": url}},
    "block": lambda url: {"type": "image", "base64": url.partition(",")[2], "mime_type": "image/png"},
}


def model(**more):
    url = f"{os.environ['CHECK_SEEING_URL']}/v1"
    return ChatOpenAI(model=MODEL, base_url=url, api_key="none", temperature=0, max_tokens=16, max_retries=0, **more)


@pytest.mark.parametrize("responses", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_images_are_seen(form, responses):
    def ask(*images):
        return model(use_responses_api=responses).invoke(
            [HumanMessage([{"type": "text", "text": "What is it?"}, *images])]
        )

    plain, one, other = ask(), *(ask(FORMS[form](url)) for url in PICTURES)
    assert len({answer.text for answer in (plain, one, other)}) == 3
    assert one.usage_metadata["input_tokens"] > plain.usage_metadata["input_tokens"]
