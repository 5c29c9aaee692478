from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.protocol.errors import NodeLost, NoNodes, Overloaded
from kvferry.router.dispatch.interface import Output, RequestSpec
from tests.api_parts import (
    EOS,
    MESSAGES,
    Api,
    FakeCluster,
    demo_text,
    error_of,
    events,
    ids_of,
    logprob_of,
    outputs_for,
    says,
)
from tests.waiting import until

ANSWER = "Hello there, 42 emoji 👩‍👧 done."


def content(chunks: list, index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def test_a_whole_answer() -> None:
    api = Api(FakeCluster(says(ANSWER), cached=20))
    response = await api.chat(model="SmolLM2-135M-Instruct")
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "SmolLM2-135M-Instruct"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", None, None)
    prompt = ids_of(demo_text().render(MESSAGES))
    assert body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(ids_of(ANSWER)) + 1,
        "total_tokens": len(prompt) + len(ids_of(ANSWER)) + 1,
        "prompt_tokens_details": {"cached_tokens": 20},
    }
    (dispatch,) = api.cluster.dispatches
    assert dispatch.spec.token_ids == tuple(prompt)
    assert dispatch.spec.params.max_tokens == 4096 - len(prompt)
    assert dispatch.spec.params.eos_token_ids == (EOS,)
    assert response.headers["x-kvferry-route"] == f"prefill=p0 decode=d0 reused=20 computed={len(prompt) - 20}"


async def test_a_streamed_answer() -> None:
    api = Api(FakeCluster(says(ANSWER)))
    response = await api.chat(stream=True)
    *chunks, done = events(response)
    assert done == "[DONE]"
    assert response.headers["x-kvferry-route"].startswith("prefill=p0 decode=d0 reused=0")
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert content(chunks) == ANSWER
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


async def test_usage_in_the_stream() -> None:
    api = Api(FakeCluster(says("one two three"), cached=16))
    *chunks, last, _ = events(await api.chat(stream=True, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(ids_of("one two three")) + 1
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


async def test_usage_in_every_chunk() -> None:
    api = Api(FakeCluster(says("one two three")))
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = events(await api.chat(stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == len(ids_of("one two three")) + 1


@pytest.mark.parametrize("per_output", [1, 2, 5, 100])
@pytest.mark.parametrize("stop", ["emoji", " there,", "👩", "ello", ["nowhere", "42 e"]])
@pytest.mark.parametrize("stream", [True, False])
async def test_stop_strings_cut_the_text_wherever_tokens_end(
    stop: str | list[str], per_output: int, stream: bool
) -> None:
    api = Api(FakeCluster(says(ANSWER, per_output=per_output)))
    response = await api.chat(stop=stop, stream=stream)
    found = stop if isinstance(stop, str) else stop[1]
    if stream:
        chunks = events(response)[:-1]
        text, last = content(chunks), chunks[-1]["choices"][0]
    else:
        last = response.json()["choices"][0]
        text = last["message"]["content"]
    assert text == ANSWER[: ANSWER.index(found)]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", found)
    (dispatch,) = api.cluster.dispatches
    assert dispatch.cancelled.is_set() or per_output == 100


@pytest.fixture
def answering() -> Api:
    return Api(FakeCluster(says("")))


@given(st.text("ab \n👩é", max_size=20), st.lists(st.text("ab \n👩é", min_size=1, max_size=3), max_size=3), st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_streamed_and_whole_answers_agree_for_any_stops(
    answering: Api, text: str, stops: list[str], data: st.DataObject
) -> None:
    """One router gives all of them."""
    answering.cluster.script = says(text)
    whole = await answering.chat(stop=stops)
    answering.cluster.script = says(text, per_output=data.draw(st.integers(1, 4)))
    streamed = await answering.chat(stop=stops, stream=True)
    chunks = events(streamed)[:-1]
    assert content(chunks) == whole.json()["choices"][0]["message"]["content"]


async def test_stop_strings_can_be_included_and_wait_for_min_tokens() -> None:
    text = "a. b. c."
    api = Api(FakeCluster(says(text)))
    shown = await api.chat(stop=".", include_stop_str_in_output=True)
    assert shown.json()["choices"][0]["message"]["content"] == "a."
    later = await api.chat(stop=".", min_tokens=len(ids_of("a. b")))
    assert later.json()["choices"][0]["message"]["content"] == "a. b"


async def test_stop_tokens_are_not_part_of_the_text_and_are_named() -> None:
    word = ids_of(" there")[0]

    def script(spec: RequestSpec) -> list[Output]:
        return [Output((ids_of("Hello")[0],)), Output((word,), finish_reason="stop", stop_token=word)]

    api = Api(FakeCluster(script))
    choice = (await api.chat(stop_token_ids=[word])).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("Hello", "stop", word)
    assert api.cluster.dispatches[0].spec.params.stop_token_ids == (word,)


async def test_length_ends_at_max_tokens() -> None:
    api = Api(FakeCluster(says(ANSWER)))
    body = (await api.chat(max_completion_tokens=3, max_tokens=9)).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 3


async def test_logprobs() -> None:
    api = Api(FakeCluster(says("é!")))
    whole = (await api.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]["logprobs"]["content"]
    ids = [*ids_of("é!"), EOS]
    assert [entry["logprob"] for entry in whole] == [logprob_of(token_id) for token_id in ids]
    assert bytes(byte for entry in whole[:-1] for byte in entry["bytes"]).decode() == "é!"
    assert all([top["logprob"] for top in entry["top_logprobs"]] == [-0.1, -1.1] for entry in whole)
    chunks = events(await api.chat(logprobs=True, top_logprobs=2, stream=True))[:-1]
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for logprobs in streamed if logprobs for entry in logprobs["content"]] == whole
    assert api.cluster.dispatches[0].spec.params.logprobs == 2


async def test_n_choices_start_after_the_first_ones_first_token_with_seeds_of_their_own() -> None:
    started: list[int] = []

    def script(spec: RequestSpec) -> list[Output]:
        started.append(seeded.cluster.dispatches[0].yielded if seeded.cluster.dispatches else -1)
        return outputs_for(spec, ids_of(f"seed {spec.params.seed}"))

    seeded = Api(FakeCluster(script))
    body = (await seeded.chat(n=3, seed=7)).json()
    assert [choice["message"]["content"] for choice in body["choices"]] == ["seed 7", "seed 8", "seed 9"]
    assert started == [-1, 1, 1]
    assert len({dispatch.spec.request_id for dispatch in seeded.cluster.dispatches}) == 3
    prompt = len(seeded.cluster.dispatches[0].spec.token_ids)
    assert body["usage"]["prompt_tokens"] == prompt
    assert body["usage"]["completion_tokens"] == 3 * (len(ids_of("seed 7")) + 1)
    chunks = events(await seeded.chat(n=3, seed=7, stream=True))[:-1]
    assert [content(chunks, index) for index in range(3)] == ["seed 7", "seed 8", "seed 9"]


async def test_a_seed_is_drawn_when_none_is_given_and_never_overflows() -> None:
    api = Api(FakeCluster(says("x")))
    await api.chat()
    await api.chat()
    await api.chat(seed=2**63 - 1, n=2)
    seeds = [dispatch.spec.params.seed for dispatch in api.cluster.dispatches]
    assert seeds[0] != seeds[1]
    assert seeds[2:] == [2**63 - 1, -(2**63)]


async def test_sampling_fields_reach_the_nodes() -> None:
    api = Api(FakeCluster(says("x")))
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1,
        "frequency_penalty": 0.2, "presence_penalty": 0.3, "min_tokens": 2, "seed": 5,
        "ignore_eos": True, "max_tokens": 10,
    }  # fmt: skip
    await api.chat(**fields, logit_bias={"5": -100}, cache_salt="tenant", unknown_field={"x": 1})
    spec = api.cluster.dispatches[0].spec
    assert {name: getattr(spec.params, name) for name in fields} == fields
    assert spec.params.logit_bias == ((5, -100.0),)
    assert spec.namespace == "0:tenant"


async def test_null_means_default() -> None:
    api = Api(FakeCluster(says("x")))
    names = (
        "temperature",
        "top_p",
        "stop",
        "n",
        "max_tokens",
        "stream",
        "logit_bias",
        "tools",
        "response_format",
        "seed",
    )
    assert (await api.chat(**dict.fromkeys(names))).status_code == 200
    assert api.cluster.dispatches[0].spec.params.temperature == 1.0


async def test_the_last_message_can_be_continued() -> None:
    api = Api(FakeCluster(says("x")))
    messages = [*MESSAGES, {"role": "assistant", "content": "Once upon"}]
    await api.chat(messages=messages, continue_final_message=True)
    text = demo_text().tokenizer.decode(api.cluster.dispatches[0].spec.token_ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nOnce upon")
    refused = await api.chat(messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert error_of(refused)["param"] == "continue_final_message"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (NoNodes("no node can serve"), 503, "no_nodes"),
        (Overloaded("full", retry_after=2.3), 429, "overloaded"),
        (NodeLost("gone"), 503, "node_lost"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("at_start", [True, False])
async def test_errors_before_the_first_token_have_their_status(
    error: NoNodes, status: int, code: str, stream: bool, at_start: bool
) -> None:
    api = Api(FakeCluster(lambda spec: [error]))
    api.cluster.refusal = error if at_start else None
    response = await api.chat(stream=stream)
    assert (response.status_code, error_of(response)["code"]) == (status, code)
    assert response.headers["retry-after"] == ("3" if status == 429 else "5")
    assert api.sample("kvferry_requests_total", endpoint="/v1/chat/completions", status=str(status)) == 1


async def test_an_error_in_mid_stream_is_an_event_and_no_done_follows() -> None:
    first = Output((ids_of("Hello")[0],))
    api = Api(FakeCluster(lambda spec: [first, NodeLost("all attempts failed")]))
    chunks = events(await api.chat(stream=True))
    assert content(chunks[:-1]) == "Hello"
    assert chunks[-1]["error"]["code"] == "node_lost"
    whole = await api.chat()
    assert (whole.status_code, error_of(whole)["code"]) == (503, "node_lost")
    assert api.sample("kvferry_requests_total", endpoint="/v1/chat/completions", status="503") == 2


async def test_one_failed_choice_cancels_the_others() -> None:
    def script(spec: RequestSpec) -> list[Output | NodeLost]:
        if spec.request_id.endswith("-1"):
            return [NodeLost("gone")]
        return [*outputs_for(spec, ids_of("x " * 50))]

    api = Api(FakeCluster(script, gap_s=0.01))
    assert (await api.chat(n=3)).status_code == 503
    assert [dispatch.cancelled.is_set() for dispatch in api.cluster.dispatches] == [True, True, True]


async def test_metrics_of_a_request() -> None:
    api = Api(FakeCluster(says("one two three"), cached=16))
    await api.chat()
    outputs, prompt = len(ids_of("one two three")) + 1, len(api.cluster.dispatches[0].spec.token_ids)
    assert api.sample("kvferry_requests_total", endpoint="/v1/chat/completions", status="200") == 1
    assert api.sample("kvferry_output_tokens_total") == outputs
    assert api.sample("kvferry_time_to_first_token_seconds_count") == 1
    assert api.sample("kvferry_inter_token_latency_seconds_count") == outputs - 1
    assert api.sample("kvferry_request_seconds_count") == 1
    assert api.sample("kvferry_prompt_tokens_total", source="reused_prefill") == 16
    assert api.sample("kvferry_prompt_tokens_total", source="computed") == prompt - 16
    await until(lambda: api.sample("kvferry_requests_inflight") == 0)


async def test_token_ids_are_returned_when_asked_for() -> None:
    api = Api(FakeCluster(says("one two")))
    body = (await api.chat(return_token_ids=True)).json()
    assert body["choices"][0]["token_ids"] == [*ids_of("one two"), EOS]
    assert body["prompt_token_ids"] == list(api.cluster.dispatches[0].spec.token_ids)
    chunks = events(await api.chat(return_token_ids=True, stream=True))[:-1]
    assert chunks[0]["prompt_token_ids"] == body["prompt_token_ids"]
    ids = [token_id for chunk in chunks for token_id in chunk["choices"][0].get("token_ids", ())]
    assert ids == body["choices"][0]["token_ids"]


async def test_a_dispatch_that_ends_without_a_reason_is_an_error() -> None:
    api = Api(FakeCluster(lambda spec: [Output((ids_of("Hello")[0],))]))
    assert (await api.chat()).status_code == 500
