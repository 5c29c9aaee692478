"""LiteLLM, as most gateways and agents call it."""

from __future__ import annotations

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"

import litellm
from harness import MODEL, URL, check, raises
from litellm import exceptions

litellm.suppress_debug_info = True
BASE = {
    "model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "num_retries": 0, "temperature": 0,
    "messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 12, "timeout": 60,
}  # fmt: skip
PLACE = {"type": "object", "properties": {"city": {"enum": ["London", "Paris"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "weather", "parameters": PLACE}}


@check
def chat():
    answer = litellm.completion(**BASE)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12


@check
def chat_through_the_openai_provider():
    assert litellm.completion(**{**BASE, "model": f"openai/{MODEL}"}).choices[0].message.content


@check
def a_stream_with_usage():
    chunks = list(litellm.completion(**BASE, stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].message.content == litellm.completion(**BASE).choices[0].message.content
    assert whole.usage.completion_tokens == 12


@check
async def async_chat_and_stream():
    assert (await litellm.acompletion(**BASE)).choices[0].message.content
    chunks = [chunk async for chunk in await litellm.acompletion(**BASE, stream=True)]
    assert chunks


@check
def many_at_once():
    answers = litellm.batch_completion(**{**BASE, "messages": [BASE["messages"]] * 4})
    assert len(answers) == 4


@check
def text_completion():
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", api_base=f"{URL}/v1", api_key="none", prompt="Once", max_tokens=4
    )
    assert answer.choices[0].text


@check
def stop_and_seed():
    word = litellm.completion(**BASE).choices[0].message.content.split()[3]
    cut = litellm.completion(**BASE, stop=[word], seed=3).choices[0]
    assert cut.finish_reason == "stop"
    assert word not in cut.message.content


@check
def logprobs():
    answer = litellm.completion(**BASE, logprobs=True, top_logprobs=2)
    assert len(answer.choices[0].logprobs.content) == 12


@check
def wrong_values_are_bad_requests():
    with raises(exceptions.BadRequestError):
        litellm.completion(**{**BASE, "temperature": -1})


@check
def unknown_models_are_not_found():
    with raises(exceptions.NotFoundError):
        litellm.completion(**{**BASE, "model": "hosted_vllm/no-such-model"})


@check
def too_long_prompts_are_recognised():
    with raises(exceptions.ContextWindowExceededError):
        litellm.completion(**{**BASE, "messages": [{"role": "user", "content": "ferry " * 9000}]})


@check
def json_schema():
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer"}},
        "required": ["age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    answer = litellm.completion(**{**BASE, "max_tokens": 100}, response_format=form)
    assert isinstance(json.loads(answer.choices[0].message.content)["age"], int)


@check
def tools():
    answer = litellm.completion(**{**BASE, "max_tokens": 100}, tools=[WEATHER], tool_choice="required")
    call = answer.choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments)["city"] in ("London", "Paris")


@check
def streamed_tools():
    chunks = list(
        litellm.completion(**{**BASE, "max_tokens": 100}, tools=[WEATHER], tool_choice="required", stream=True)
    )
    call = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments)["city"] in ("London", "Paris")


@check
def embeddings():
    answer = litellm.embedding(model=f"hosted_vllm/{MODEL}", input=["one", "two"], api_base=f"{URL}/v1", api_key="none")
    assert len(answer.data) == 2


@check
def responses():
    answer = litellm.responses(
        model=f"openai/{MODEL}",
        input="Why is the sky blue?",
        max_output_tokens=12,
        api_base=f"{URL}/v1",
        api_key="none",
    )
    assert answer.output
