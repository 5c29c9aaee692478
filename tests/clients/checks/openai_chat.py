"""The official Python client: models, chat, completions, errors."""

from __future__ import annotations

import asyncio
import json
import time

import openai
from harness import MODEL, URL, check, raises

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60)
SKY = [{"role": "user", "content": "Why is the sky blue?"}]
BRIEF = {"model": MODEL, "messages": SKY, "max_tokens": 12, "temperature": 0}


def text_of(chunks):
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


@check
def models_are_listed_and_retrieved():
    listed = client.models.list()
    assert MODEL in [model.id for model in listed.data]
    found = client.models.retrieve(MODEL)
    assert (found.id, found.object) == (MODEL, "model")
    assert found.created > 0


@check
def unknown_model_is_not_found():
    with raises(openai.NotFoundError) as caught:
        client.models.retrieve("no-such-model")
    assert caught[0].code == "model_not_found"
    with raises(openai.NotFoundError):
        client.chat.completions.create(**{**BRIEF, "model": "no-such-model"})


@check
def chat_answers():
    answer = client.chat.completions.create(**BRIEF)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


@check
def chat_reads_its_history():
    messages = [
        {"role": "system", "content": "You are terse."},
        *SKY,
        {"role": "assistant", "content": "It scatters light."},
        {"role": "user", "content": "Why?"},
    ]
    longer = client.chat.completions.create(**{**BRIEF, "messages": messages})
    assert longer.usage.prompt_tokens > client.chat.completions.create(**BRIEF).usage.prompt_tokens


@check
def content_may_come_in_parts():
    parts = [{"role": "user", "content": [{"type": "text", "text": "Why is the sky blue?"}]}]
    whole, cut = (client.chat.completions.create(**{**BRIEF, "messages": each}) for each in (SKY, parts))
    assert whole.usage.prompt_tokens == cut.usage.prompt_tokens
    assert whole.choices[0].message.content == cut.choices[0].message.content


@check
def a_stream_says_what_the_whole_answer_says():
    chunks = list(client.chat.completions.create(**BRIEF, stream=True))
    assert text_of(chunks) == client.chat.completions.create(**BRIEF).choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len({chunk.id for chunk in chunks}) == 1


@check
def a_stream_ends_with_usage():
    *chunks, last = client.chat.completions.create(**BRIEF, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks)


@check
def the_stream_helper_collects():
    with client.chat.completions.stream(**{**BRIEF, "max_tokens": 200}, stop=["."]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "content.delta" in kinds
    assert final.choices[0].message.content


@check
def equal_prompts_reuse_their_prefix():
    long = [{"role": "user", "content": "Repeat after me: " + "one two three " * 60}]
    for _ in range(2):
        answer = client.chat.completions.create(**{**BRIEF, "messages": long, "max_tokens": 2})
    assert answer.usage.prompt_tokens_details.cached_tokens > 100


@check
def the_newer_name_bounds_the_output():
    answer = client.chat.completions.create(model=MODEL, messages=SKY, max_completion_tokens=5)
    assert answer.usage.completion_tokens == 5


@check
def stop_strings_end_and_stay_out():
    free = client.chat.completions.create(**BRIEF).choices[0].message.content
    word = free.split()[3]
    for stop in (word, ["never comes", word]):
        cut = client.chat.completions.create(**BRIEF, stop=stop).choices[0]
        assert cut.finish_reason == "stop"
        assert cut.message.content == free[: free.index(word)]


@check
def stop_strings_hold_in_a_stream():
    free = client.chat.completions.create(**BRIEF).choices[0].message.content
    word = free.split()[3]
    chunks = list(client.chat.completions.create(**BRIEF, stop=[word], stream=True))
    assert text_of(chunks) == free[: free.index(word)]
    assert chunks[-1].choices[0].finish_reason == "stop"


@check
def seeds_repeat_and_differ():
    hot = {**BRIEF, "temperature": 1.2, "max_tokens": 16}
    texts = [client.chat.completions.create(**hot, seed=seed).choices[0].message.content for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


@check
def several_choices_come():
    answer = client.chat.completions.create(**{**BRIEF, "temperature": 1}, n=3, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert answer.usage.completion_tokens == 36


@check
def several_choices_are_streamed():
    chunks = list(client.chat.completions.create(**{**BRIEF, "temperature": 1}, n=2, stream=True))
    ends = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert sorted(ends) == [0, 1]


@check
def logprobs_of_a_chat():
    choice = client.chat.completions.create(**BRIEF, logprobs=True, top_logprobs=3).choices[0]
    entries = choice.logprobs.content
    assert len(entries) == 12
    assert "".join(entry.token for entry in entries) == choice.message.content
    for entry in entries:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert bytes(entry.bytes).decode(errors="replace")
        assert abs(entry.top_logprobs[0].logprob - entry.logprob) < 1e-6


@check
def logprobs_are_streamed():
    chunks = client.chat.completions.create(**BRIEF, logprobs=True, top_logprobs=2, stream=True)
    entries = [e for chunk in chunks for choice in chunk.choices if choice.logprobs for e in choice.logprobs.content]
    assert len(entries) == 12


@check
def a_bias_forbids_and_forces():
    forced = client.completions.create(model=MODEL, prompt="Once", max_tokens=4, logit_bias={"28": 100}, logprobs=0)
    assert len(set(forced.choices[0].logprobs.tokens)) == 1


@check
def penalties_change_the_text():
    free = {**BRIEF, "max_tokens": 40}
    plain = client.chat.completions.create(**free).choices[0].message.content
    moved = client.chat.completions.create(**free, frequency_penalty=2, presence_penalty=2).choices[0].message.content
    assert plain != moved


@check
def raw_responses_have_headers():
    raw = client.chat.completions.with_raw_response.create(**BRIEF, extra_headers={"x-request-id": "from-a-client"})
    assert raw.headers["x-request-id"] == "from-a-client"
    assert "decode=" in raw.headers["x-kvferry-route"]
    assert raw.parse().choices[0].message.content


@check
def unicode_goes_in_and_out():
    text = "Übergröße 東京 🚲 naïve"
    answer = client.completions.create(model=MODEL, prompt=text, echo=True, max_tokens=0)
    assert answer.choices[0].text == text


@check
def long_inputs_are_read():
    """Longer than several steps of the engine, but no longer than a busy machine computes within the time limit."""
    long = "The ferry carries cars and people. " * 150
    answer = client.completions.create(model=MODEL, prompt=long, max_tokens=2)
    assert answer.usage.prompt_tokens > 1024


@check
def too_long_inputs_are_refused():
    with raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="ferry " * 9000, max_tokens=2)
    assert caught[0].code == "context_length_exceeded"
    assert "maximum context length" in caught[0].message


@check
def completions_continue_texts():
    answer = client.completions.create(model=MODEL, prompt=["Once upon", "The capital of France"], max_tokens=6, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.object == "text_completion"


@check
def completions_echo_with_logprobs():
    answer = client.completions.create(
        model=MODEL, prompt="The capital of France is Paris", echo=True, max_tokens=1, logprobs=2
    )
    shown = answer.choices[0].logprobs
    assert shown.token_logprobs[0] is None
    assert all(value <= 0 for value in shown.token_logprobs[1:])
    assert len(shown.tokens) == len(shown.top_logprobs) == len(shown.text_offset) == answer.usage.total_tokens
    assert answer.choices[0].text.startswith("The capital of France is Paris")


@check
def completions_take_token_ids():
    answer = client.completions.create(model=MODEL, prompt=[[504, 2240], [504, 2240, 282]], max_tokens=3)
    assert answer.usage.prompt_tokens == 5
    assert len(answer.choices) == 2


@check
def completions_are_streamed():
    chunks = list(
        client.completions.create(
            model=MODEL, prompt="Once", max_tokens=6, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].usage.completion_tokens == 6
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1])


@check
def bad_values_are_bad_requests():
    for field, value in {"temperature": -1, "top_p": 2, "n": 0, "max_tokens": -5, "top_logprobs": 1}.items():
        with raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**{**BRIEF, field: value})
        assert caught[0].param == field, (field, caught[0].param)
        assert caught[0].type == "invalid_request_error"


@check
def broken_messages_are_bad_requests():
    for messages in ([], [{"role": "user"}, "text"], [{"role": "nobody", "content": "hi"}]):
        with raises(openai.BadRequestError):
            client.chat.completions.create(**{**BRIEF, "messages": messages})


@check
def unknown_routes_are_not_found():
    with raises(openai.NotFoundError) as caught:
        client.get("/no/such/route", cast_to=object)
    assert caught[0].body["message"]


@check
def errors_carry_the_request_id():
    with raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**BRIEF, top_p=3, extra_headers={"x-request-id": "wrong-1"})
    assert caught[0].request_id == "wrong-1"


@check
def a_timeout_is_a_timeout():
    with raises(openai.APITimeoutError):
        client.with_options(timeout=0.05).chat.completions.create(**{**BRIEF, "max_tokens": 400})


@check
def nobody_there_is_a_connection_error():
    with raises(openai.APIConnectionError):
        openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="x", max_retries=1).models.list()


@check
def a_closed_stream_frees_its_place():
    stream = client.chat.completions.create(
        **{**BRIEF, "max_tokens": 2000}, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    began = time.monotonic()
    client.chat.completions.create(**BRIEF)
    assert time.monotonic() - began < 20


@check
def vllm_fields_are_understood():
    answer = client.chat.completions.create(
        **BRIEF, extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 3, "ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 12


@check
def unknown_fields_are_ignored():
    for field in ({"user": "me"}, {"metadata": {"a": "b"}}, {"store": False}, {"service_tier": "auto"}):
        assert client.chat.completions.create(**BRIEF, **field).choices


@check
async def async_answers_together():
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as many:
        answers = await asyncio.gather(*(many.chat.completions.create(**BRIEF) for _ in range(8)))
    assert len({answer.choices[0].message.content for answer in answers}) == 1


@check
async def async_streams():
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as one:
        stream = await one.chat.completions.create(**BRIEF, stream=True)
        chunks = [chunk async for chunk in stream]
    assert text_of(chunks)


@check
async def a_cancelled_task_leaves_nothing_behind():
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as one:
        task = asyncio.create_task(one.chat.completions.create(**{**BRIEF, "max_tokens": 2000}))
        await asyncio.sleep(0.3)
        task.cancel()
        with raises(asyncio.CancelledError):
            await task
        assert (await one.chat.completions.create(**BRIEF)).choices


@check
def bodies_are_json_whatever_the_length():
    quote = 'a "quoted" \\ line\nand \t another \u2028'
    answer = client.completions.create(model=MODEL, prompt=quote, echo=True, max_tokens=0)
    assert json.loads(json.dumps(answer.choices[0].text)) == quote
