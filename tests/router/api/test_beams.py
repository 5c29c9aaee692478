"""Beam search at the door: chat and completions, their bounds, and what goes to the nodes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvferry.protocol.errors import KvferryError, NodeLost
from kvferry.protocol.messages import TokenLogprobs
from kvferry.router.dispatch.interface import Output, RequestSpec
from tests.api_parts import EOS, Api, FakeCluster, demo_text, error_of, ids_of, prompt_logprobs_of, says

A, B, C = ids_of("Once upon a time")[:3]
NEXT: dict[tuple[int, ...], dict[int, float]] = {
    (): {A: 0.5, B: 0.4, EOS: 0.1},
    (A,): {C: 0.4, B: 0.35, EOS: 0.25},
    (B,): {EOS: 0.9, C: 0.1},
}
"""Greedy begins with A; the likeliest whole is B and the end."""


def answers(spec: RequestSpec) -> list[Output | KvferryError]:
    prompt = demo_text().encode("Once upon")
    made = spec.token_ids[len(prompt) :] if spec.token_ids[: len(prompt)] == tuple(prompt) else spec.token_ids[-0:0]
    shares = NEXT.get(tuple(made), {C: 0.6, A: 0.4})
    likely = tuple(sorted(((t, math.log(p)) for t, p in shares.items()), key=lambda pair: -pair[1]))
    token, logprob = likely[0]
    count = spec.params.logprobs or 0
    return [
        Output((token,), (TokenLogprobs(token, logprob, 1, likely[:count]),), "length", None, prompt_logprobs_of(spec))
    ]


async def test_the_best_beam_is_not_the_greedy_one() -> None:
    api = Api(FakeCluster(answers))
    fields = {"use_beam_search": True, "max_tokens": 2, "length_penalty": 0.0, "temperature": 0.7}
    answer = (await api.complete(n=2, **fields, logprobs=1)).json()
    tokens = [c["logprobs"]["tokens"] for c in answer["choices"]]
    text = demo_text().tokenizer
    assert answer["choices"][0]["text"] == text.decode([B], skip_special_tokens=True)
    assert [c["finish_reason"] for c in answer["choices"]] == ["stop", "length"]
    assert [len(t) for t in tokens] == [2, 2]
    found = [sum(c["logprobs"]["token_logprobs"]) for c in answer["choices"]]
    assert found == [pytest.approx(math.log(0.36)), pytest.approx(math.log(0.2))]
    assert all(len(top) <= 2 for c in answer["choices"] for top in c["logprobs"]["top_logprobs"]), "asked and chosen"
    assert answer["usage"]["completion_tokens"] == 4
    one = (await api.complete(best_of=2, **fields)).json()
    assert [c["text"] for c in one["choices"]] == [answer["choices"][0]["text"]]


async def test_each_step_forks_from_the_beam_it_extends() -> None:
    api = Api(FakeCluster(answers))
    assert (await api.complete(n=2, use_beam_search=True, max_tokens=2)).is_success
    root, *steps = [dispatch.spec for dispatch in api.cluster.dispatches]
    assert root.fork_of is None
    assert [s.fork_of.request_id for s in steps if s.fork_of] == [root.request_id] * 2
    assert {s.token_ids[len(root.token_ids) :] for s in steps} == {(A,), (B,)}
    assert len({s.request_id for s in [root, *steps]}) == 3
    for spec in (root, *steps):
        assert (spec.params.max_tokens, spec.params.logprobs, spec.params.temperature) == (1, 4, 0.0)
        assert spec.params.ending_token_ids == ()


async def test_chat_and_several_prompts_and_the_prompt_s_log_probabilities() -> None:
    api = Api(FakeCluster(answers))
    chat = (await api.chat(use_beam_search=True, n=2, best_of=3, max_tokens=3, prompt_logprobs=1)).json()
    assert [c["index"] for c in chat["choices"]] == [0, 1]
    assert all(c["message"]["content"] for c in chat["choices"])
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    many = (await api.complete(prompt=["Once upon", "b"], use_beam_search=True, n=2, max_tokens=3)).json()
    assert [c["index"] for c in many["choices"]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"n": 11}, "n"),
        ({"best_of": 11}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"length_penalty": "x"}, "length_penalty"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"use_beam_search": "perhaps"}, "use_beam_search"),
    ],
)
async def test_what_does_not_go_with_it_is_refused(fields: dict[str, Any], param: str) -> None:
    api = Api(FakeCluster(says("x")))
    for call in api.chat, api.complete:
        response = await call(**{"use_beam_search": True, **fields})
        assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert not api.cluster.dispatches


async def test_what_asks_for_nothing_is_taken() -> None:
    api = Api(FakeCluster(answers))
    neutral = {"frequency_penalty": 0, "repetition_penalty": 1.0, "logit_bias": {}, "bad_words": [], "top_p": 0.5}
    assert (await api.complete(use_beam_search=True, max_tokens=2, **neutral)).is_success


async def test_a_step_that_fails_ends_the_request_and_the_other_beams() -> None:
    def breaks(spec: RequestSpec) -> list[Output | KvferryError]:
        return answers(spec) if len(api.cluster.dispatches) < 2 else [NodeLost("gone")]

    api = Api(FakeCluster(breaks))
    response = await api.complete(use_beam_search=True, n=3, max_tokens=4)
    assert (response.status_code, error_of(response)["code"]) == (503, "node_lost")
