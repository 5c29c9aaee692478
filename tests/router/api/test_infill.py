from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from tests.api_parts import Api, FakeCluster, error_of, events, says, served
from tests.infill_parts import text_with

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


@pytest.fixture
def api() -> Api:
    return Api(FakeCluster(says("middle part"), cached=2), text_with(*MARKS))


def prompt_of(api: Api) -> str:
    spec = api.cluster.dispatches[-1].spec
    text = text_with(*MARKS)
    return text.tokenizer.decode(spec.token_ids, skip_special_tokens=False)


async def infill(api: Api, **body: Any) -> httpx.Response:
    return await api.http.post("/infill", json={"input_prefix": "def f(", "input_suffix": "):", **body})


async def test_a_completion_with_a_suffix_fills_in_the_middle(api: Api) -> None:
    answer = (await api.complete(prompt="def f(", suffix="): pass")).json()
    assert answer["choices"][0]["text"] == "middle part"
    assert prompt_of(api).endswith("<|fim_prefix|>def f(<|fim_suffix|>): pass<|fim_middle|>")
    ids = [text_with(*MARKS).tokenizer.library.token_to_id(each) for each in MARKS]
    assert set(ids) <= set(api.cluster.dispatches[-1].spec.params.stop_token_ids)


async def test_openai_s_client_fills_in_the_middle(api: Api) -> None:
    with served(api.app) as url:
        client = AsyncOpenAI(base_url=url + "/v1", api_key="none")
        answer = await client.completions.create(model="SmolLM2-135M-Instruct", prompt="def f(", suffix="):")
        stream = await client.completions.create(model="SmolLM2-135M-Instruct", prompt="a", suffix="b", stream=True)
        assert answer.choices[0].text == "".join([each.choices[0].text async for each in stream]) == "middle part"


async def test_an_empty_suffix_is_none(api: Api) -> None:
    assert (await api.complete(prompt="def f(", suffix="")).status_code == 200
    assert prompt_of(api).endswith("def f(")


async def test_several_prompts_share_the_suffix(api: Api) -> None:
    assert (await api.complete(prompt=["a", "b"], suffix="c")).status_code == 200
    found = [each.spec.token_ids for each in api.cluster.dispatches]
    text = text_with(*MARKS)
    shown = [text.tokenizer.decode(each, skip_special_tokens=False) for each in found]
    assert [each[each.index("<|fim_prefix") :] for each in shown] == [
        f"<|fim_prefix|>{each}<|fim_suffix|>c<|fim_middle|>" for each in "ab"
    ]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"echo": True}, "echo"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"prompt": [1, 2]}, "suffix"),
    ],
)
async def test_what_a_suffix_excludes_is_refused_by_name(api: Api, body: dict[str, Any], param: str) -> None:
    answer = await api.complete(**{"prompt": "a", "suffix": "b", **body})
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


async def test_a_model_without_the_tokens_refuses_both_by_the_field() -> None:
    api = Api(FakeCluster(says("x")))
    for answer, param in ((await api.complete(suffix="b"), "suffix"), (await infill(api), "input_suffix")):
        assert answer.status_code == 400
        assert error_of(answer)["param"] == param
        assert "fill-in-the-middle" in error_of(answer)["message"]


async def test_infill_answers_in_llama_cpp_s_shape(api: Api) -> None:
    answer = (await infill(api, prompt="x", n_predict=7)).json()
    assert prompt_of(api).endswith("<|fim_prefix|>def f(x<|fim_suffix|>):<|fim_middle|>")
    assert api.cluster.dispatches[-1].spec.params.max_tokens == 7
    assert (answer["content"], answer["stop"], answer["stop_type"]) == ("middle part", True, "eos")
    prompt = len(api.cluster.dispatches[-1].spec.token_ids)
    assert (answer["tokens_evaluated"], answer["tokens_cached"], answer["timings"]["prompt_n"]) == (
        prompt,
        2,
        prompt - 2,
    )
    assert answer["tokens_predicted"] == answer["timings"]["predicted_n"] > 0


async def test_infill_streams_texts_and_ends_with_the_counts(api: Api) -> None:
    found = events(await infill(api, stream=True))
    assert "".join(each["content"] for each in found) == "middle part"
    assert [each["stop"] for each in found] == [False] * (len(found) - 1) + [True]
    assert (found[-1]["content"], found[-1]["stop_type"]) == ("", "eos")


async def test_infill_ends_at_its_limit_and_at_words(api: Api) -> None:
    assert (await infill(api, n_predict=1)).json()["stop_type"] == "limit"
    stopped = (await infill(api, stop=[" part"])).json()
    assert (stopped["content"], stopped["stop_type"], stopped["stopping_word"]) == ("middle", "word", " part")


async def test_infill_warms_the_cache_without_an_output(api: Api) -> None:
    answer = (await infill(api, n_predict=0)).json()
    assert answer["content"] == ""
    assert api.cluster.dispatches[-1].spec.params.max_tokens == 1


async def test_infill_takes_llama_cpp_s_names_and_defaults(api: Api) -> None:
    extra = [{"filename": "a.py", "text": "import a\n"}, {"text": "two"}]
    body = {
        "input_extra": extra,
        "n_predict": -1,
        "seed": -1,
        "repeat_penalty": 1.5,
        "cache_prompt": True,
        "samplers": [],
    }
    assert (await infill(api, **body)).status_code == 200
    params = api.cluster.dispatches[-1].spec.params
    assert (params.repetition_penalty, params.seed >= 0, params.max_tokens > 1000) == (1.5, True, True)
    assert "import a\n" in prompt_of(api)
    refused = await infill(api, n=2)
    assert (refused.status_code, error_of(refused)["param"]) == (400, "n")
