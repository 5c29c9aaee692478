"""best_of, bad_words and allowed_token_ids at the door."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvferry.protocol.messages import TokenLogprobs
from kvferry.router.dispatch.interface import Output, RequestSpec
from kvferry.router.text.bad_words import bad_word_ids
from tests.api_parts import Api, FakeCluster, demo_text, error_of, ids_of, outputs_for, says


def scored(spec: RequestSpec) -> list[Output]:
    """Texts of different lengths and log-probabilities, told apart by the seed: choice i is i + 1 times " a"; the first
    and the third are the likeliest for each token, the last is the least likely."""
    choice = spec.params.seed
    each = (-0.5, -2.0, -1.0, -3.0)[choice % 4]
    ids = tuple(ids_of(" a" * (choice + 1)))
    entries = tuple(TokenLogprobs(token, each, 1) for token in ids) if spec.params.logprobs is not None else None
    return [Output(ids, entries, "length")]


async def test_the_best_are_those_of_the_greatest_log_probability_per_token() -> None:
    api = Api(FakeCluster(scored))
    answer = (await api.complete(n=2, best_of=4, seed=0, max_tokens=8)).json()
    assert [(c["index"], c["text"], c["logprobs"]) for c in answer["choices"]] == [(0, " a", None), (1, " a a a", None)]
    assert answer["usage"]["completion_tokens"] == 1 + 2 + 3 + 4
    assert [j.spec.params.logprobs for j in api.cluster.dispatches] == [0] * 4
    assert [bool(j.spec.fork_of) for j in api.cluster.dispatches] == [False, True, True, True]


async def test_the_best_of_every_prompt_are_shown_with_what_was_asked() -> None:
    api = Api(FakeCluster(scored))
    answer = (await api.complete(prompt=["a", "b"], best_of=3, seed=1, logprobs=1, echo=True)).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "a a a a"), (1, "b a a a")]
    assert all(c["logprobs"]["token_logprobs"][-3:] == [-1.0] * 3 for c in answer["choices"])


async def test_best_of_equal_to_n_changes_nothing() -> None:
    for fields in ({"best_of": 2, "n": 2}, {"best_of": 2, "n": 2, "stream": True}, {"best_of": 1}):
        api = Api(FakeCluster(says("x")))
        assert (await api.complete(**fields)).is_success
        assert api.cluster.dispatches[0].spec.params.logprobs is None


@pytest.mark.parametrize(
    "fields", [{"best_of": 1, "n": 2}, {"best_of": 2, "stream": True}, {"best_of": 129}, {"best_of": 0}]
)
async def test_best_of_out_of_bounds(fields: dict[str, Any]) -> None:
    response = await Api(FakeCluster(says("x"))).complete(**fields)
    assert (response.status_code, error_of(response)["param"]) == (400, "best_of")


def test_bad_words_are_spelt_with_and_without_a_space_in_front() -> None:
    text = demo_text()
    (bare,), (spaced,) = ids_of("cat"), ids_of(" cat")
    assert bad_word_ids(["cat"], text) == ((bare,), (spaced,))
    assert bad_word_ids([" cat"], text) == bad_word_ids(["cat", "cat"], text) == ((bare,), (spaced,))
    longer = bad_word_ids(["New York"], text)
    assert longer == (tuple(ids_of("New York")), tuple(ids_of(" New York")))
    assert bad_word_ids([], text) == ()


@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_they_reach_the_nodes(path: str) -> None:
    api = Api(FakeCluster(lambda spec: outputs_for(spec, [5])))
    response = await getattr(api, path)(bad_words=["cat"], allowed_token_ids=[3, 4], n=2)
    assert response.is_success
    for dispatch in api.cluster.dispatches:
        assert dispatch.spec.params.allowed_token_ids == (3, 4)
        assert dispatch.spec.params.bad_words == bad_word_ids(["cat"], demo_text())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [49152]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1] * 40_000}, "allowed_token_ids"),
        ({"allowed_token_ids": "x"}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"bad_words": ["x" * 300]}, "bad_words[0]"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"bad_words": "x"}, "bad_words"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_bounds_are_told(fields: dict[str, Any], param: str) -> None:
    for call in (api := Api(FakeCluster(says("x")))).chat, api.complete:
        response = await call(**fields)
        assert (response.status_code, error_of(response)["param"]) == (400, param)


async def test_many_bad_words_cost_little() -> None:
    api = Api(FakeCluster(says("x")))
    chance = random.Random(3)
    bad = ["".join(chance.choices("abc dé", k=250)) + "x" for _ in range(128)]
    assert (await api.complete(prompt=["a", "b"], bad_words=bad)).is_success
    assert len(api.cluster.dispatches[0].spec.params.bad_words) <= 256


async def test_prompt_logprobs_come_with_every_choice_of_every_prompt() -> None:
    api = Api(FakeCluster(says("x")))
    prompts = ["Once upon", "Once upon a time there was"]
    whole = (await api.complete(prompt=prompts, n=2, prompt_logprobs=1)).json()
    lengths = [len(demo_text().encode(prompt)) for prompt in prompts]
    assert [len(c["prompt_logprobs"]) for c in whole["choices"]] == [lengths[0]] * 2 + [lengths[1]] * 2
    assert all(c["prompt_logprobs"][0] is None and all(c["prompt_logprobs"][1:]) for c in whole["choices"])
    best = (await api.complete(prompt=prompts, best_of=3, prompt_logprobs=0)).json()
    assert [len(c["prompt_logprobs"]) for c in best["choices"]] == lengths
    chat = (await api.chat(n=3, prompt_logprobs=2)).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    asked = [j.spec.params.prompt_logprobs for j in api.cluster.dispatches]
    assert asked.count(None) == len(asked) - 5, "computed once for each prompt"
