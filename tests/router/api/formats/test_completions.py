from __future__ import annotations

import threading
from typing import Any

import pytest

from kvferry.router.dispatch.interface import RequestSpec
from kvferry.router.text.text_model import TextModel
from tests.api_parts import EOS, Api, FakeCluster, demo_text, error_of, events, ids_of, logprob_of, outputs_for, says


def echo_seed(spec: RequestSpec) -> list:
    return outputs_for(spec, ids_of(f"{len(spec.token_ids)} {spec.params.seed}"), finish="stop")


async def test_a_whole_answer_is_at_most_16_tokens_by_default() -> None:
    api = Api(FakeCluster(says("word " * 40)))
    body = (await api.complete()).json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": ("word " * 40)[:80].rstrip() + body["choices"][0]["text"][79:], "logprobs": None,
         "finish_reason": "length", "stop_reason": None}
    ]  # fmt: skip
    assert body["usage"]["completion_tokens"] == 16
    assert api.cluster.dispatches[0].spec.token_ids == tuple(ids_of("Once upon"))


async def test_a_streamed_answer() -> None:
    api = Api(FakeCluster(says(" a time 🎉")))
    *chunks, last, done = events(await api.complete(stream=True, stream_options={"include_usage": True}))
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " a time 🎉"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert {chunk["object"] for chunk in [*chunks, last]} == {"text_completion"}
    assert last["usage"]["total_tokens"] == len(ids_of("Once upon")) + len(ids_of(" a time 🎉")) + 1


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [
        ("one two", [2]),
        (["one", "one two three"], [1, 3]),
        ([5, 6, 7], [3]),
        ([[5, 6, 7], [8]], [3, 1]),
    ],
)
async def test_prompts_come_in_four_forms(prompt: object, lengths: list[int]) -> None:
    api = Api(FakeCluster(echo_seed))
    body = (await api.complete(prompt=prompt, seed=3, n=2)).json()
    expected = [f"{length} {seed}" for length in lengths for seed in (3, 4)]
    assert [choice["text"] for choice in body["choices"]] == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert body["usage"]["prompt_tokens"] == sum(lengths)
    assert len({dispatch.spec.request_id for dispatch in api.cluster.dispatches}) == len(expected)


async def test_logprobs_in_the_legacy_shape() -> None:
    api = Api(FakeCluster(says("é b")))
    shown = (await api.complete(logprobs=2)).json()["choices"][0]["logprobs"]
    ids = [*ids_of("é b"), EOS]
    assert shown["token_logprobs"] == [logprob_of(token_id) for token_id in ids]
    assert shown["tokens"][-1] == "<|im_end|>"
    assert all(len(top) == 3 and top[token] == logprob for token, logprob, top in zip(
        shown["tokens"], shown["token_logprobs"], shown["top_logprobs"], strict=True))  # fmt: skip
    assert shown["text_offset"][0] == 0
    assert shown["text_offset"][-1] == len("é b")


async def test_half_a_character_is_spelled_in_bytes() -> None:
    ids = ids_of("漢")
    assert len(ids) > 1
    api = Api(FakeCluster(says("漢")))
    shown = (await api.complete(logprobs=0)).json()["choices"][0]["logprobs"]
    assert all(token.startswith("bytes:\\x") for token in shown["tokens"][:-1])
    named = (await api.complete(logprobs=0, return_tokens_as_token_ids=True)).json()["choices"][0]["logprobs"]
    assert named["tokens"] == [f"token_id:{token_id}" for token_id in [*ids, EOS]]


async def test_what_lm_eval_sends() -> None:
    """Scoring: prompts of token ids, echo, one token to generate, which the client drops."""
    texts = ["The sky is blue", "One plus one is 2 🎉"]
    prompts = [ids_of(text) for text in texts]
    api = Api(FakeCluster(lambda spec: outputs_for(spec, [EOS], finish="length")))
    body = (await api.complete(prompt=prompts, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234)).json()
    for choice, text, ids in zip(body["choices"], texts, prompts, strict=True):
        shown = choice["logprobs"]
        assert choice["text"] == text
        assert shown["token_logprobs"][0] is None
        assert shown["top_logprobs"][0] is None
        assert shown["token_logprobs"][1:] == [logprob_of(token_id) for token_id in [*ids[1:], EOS]]
        assert len(shown["tokens"]) == len(shown["top_logprobs"]) == len(shown["text_offset"]) == len(ids) + 1
        whole = [
            (token, at)
            for token, at in zip(shown["tokens"], shown["text_offset"], strict=True)
            if token[:6] != "bytes:"
        ]
        assert all(text[at : at + len(token)] == token for token, at in whole[:-1])
        assert shown["text_offset"][-1] == len(text)
        assert all(logprob <= max(top.values()) for logprob, top in zip(
            shown["token_logprobs"][1:], shown["top_logprobs"][1:], strict=True))  # fmt: skip
    assert [dispatch.spec.params.prompt_logprobs for dispatch in api.cluster.dispatches] == [1, 1]


@pytest.mark.parametrize("stream", [True, False])
async def test_max_tokens_0_with_echo_shows_the_prompt_only(stream: bool) -> None:
    api = Api(FakeCluster(says("never shown")))
    response = await api.complete(echo=True, max_tokens=0, logprobs=0, stream=stream)
    body = events(response)[0] if stream else response.json()
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Once upon", "length")
    assert len(choice["logprobs"]["tokens"]) == len(ids_of("Once upon"))
    if not stream:
        assert body["usage"]["completion_tokens"] == 0
    assert api.cluster.dispatches[0].spec.params.max_tokens == 1
    assert error_of(await api.complete(max_tokens=0))["param"] == "max_tokens"


async def test_echo_in_a_stream_with_logprobs_equals_the_whole_answer() -> None:
    api = Api(FakeCluster(says(" a time")))
    fields = {"echo": True, "logprobs": 1, "n": 2, "seed": 1}
    whole = (await api.complete(**fields)).json()["choices"]
    chunks = events(await api.complete(**fields, stream=True))[:-1]
    for expected in whole:
        parts = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == expected["index"]]
        assert "".join(part["text"] for part in parts) == expected["text"] == "Once upon a time"
        for name, values in expected["logprobs"].items():
            assert [value for part in parts for value in part["logprobs"][name]] == values
    asked = [dispatch.spec.params.prompt_logprobs for dispatch in api.cluster.dispatches]
    assert asked == [1, None, 1, None], "the prompt is scored once, not for every choice"


async def test_prompt_logprobs_of_vllm() -> None:
    api = Api(FakeCluster(says("x")))
    choice = (await api.complete(prompt_logprobs=1)).json()["choices"][0]
    first, second = choice["prompt_logprobs"]
    upon = ids_of("Once upon")[1]
    assert first is None
    assert second[str(upon)] == {"logprob": logprob_of(upon), "rank": 7, "decoded_token": " upon"}
    assert second["100"]["rank"] == 1
    assert error_of(await api.complete(prompt_logprobs=1, stream=True))["param"] == "prompt_logprobs"


async def test_many_short_prompts_together_are_encoded_off_the_loop() -> None:
    threads: set[int] = set()

    class Watched(TextModel):
        def encode_all(self, texts: Any, *, add_special_tokens: bool = True) -> list[list[int]]:
            threads.add(threading.get_ident())
            return demo_text().encode_all(texts, add_special_tokens=add_special_tokens)

    demo = demo_text()
    text = Watched(demo.called, demo.tokenizer, demo.template, demo.facts)
    api = Api(FakeCluster(echo_seed), text)
    await api.complete(prompt=["some words " * 50] * 3)
    assert threads == {threading.get_ident()}
    threads.clear()
    response = await api.complete(prompt=["some words " * 50] * 60, seed=1)
    assert threads
    assert threading.get_ident() not in threads
    assert {choice["text"] for choice in response.json()["choices"]} == {f"{len(ids_of('some words ' * 50))} 1"}


async def test_long_prompts_can_be_truncated() -> None:
    api = Api(FakeCluster(echo_seed))
    text = "many words " * 4000
    whole = await api.complete(prompt=text)
    assert error_of(whole)["code"] == "context_length_exceeded"
    cut = await api.complete(prompt=text, truncate_prompt_tokens=100, seed=1, echo=True)
    assert cut.json()["usage"]["prompt_tokens"] == 100
    ids = ids_of(text)[-100:]
    assert cut.json()["choices"][0]["text"] == demo_text().tokenizer.decode(ids) + "100 1"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [1] * 4096}, "prompt"),
        ({"prompt": [1] * 5000}, "prompt"),
        ({"prompt": [1] * 4000, "max_tokens": 97}, "max_tokens"),
    ],
)
async def test_beyond_the_context_is_told_in_the_words_clients_know(fields: dict, param: str) -> None:
    api = Api(FakeCluster(says("x")))
    response = await api.complete(**fields)
    error = error_of(response)
    assert response.status_code == 400
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "maximum context length" in error["message"]
    assert (await api.complete(prompt=[1] * 4000, max_tokens=96)).status_code == 200
    assert (await api.complete(prompt=[1] * 4090)).status_code == 200, "the default shrinks to what is left"
