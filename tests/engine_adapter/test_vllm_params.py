"""What vLLM is asked for, and what its answers mean."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.engine_adapter.engine import EngineCall
from kvferry.engine_adapter.engine_errors import failure
from kvferry.engine_adapter.engines import vllm_params
from kvferry.engine_adapter.engines.addresses import reachable
from kvferry.engine_adapter.engines.vllm import VllmEngine
from kvferry.protocol.errors import InvalidRequest, StepFailed
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Grammar

ALL = SamplingParams(
    max_tokens=7, min_tokens=2, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.1,
    frequency_penalty=0.2, presence_penalty=0.3, logit_bias=((4, 1.5),), seed=11, logprobs=2, stop_token_ids=(8,),
    eos_token_ids=(9,), allowed_token_ids=(4, 5, 8, 9),
)  # fmt: skip


def body(params: SamplingParams = ALL, **more: Any) -> dict[str, Any]:
    built: dict[str, Any] = json.loads(json.dumps(vllm_params.body(EngineCall("r-0-1", (1, 2), params, **more), "toy")))
    return built


class Sources:
    """A server that tells these sources of KV events."""

    host = "10.0.0.7"

    def __init__(self, ranks: int) -> None:
        self._told = {
            str(rank): {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{5557 + rank}"}
            for rank in range(ranks)
        }

    async def get(self, path: str) -> Any:
        models = {"data": [{"id": "toy", "max_model_len": 64}]}
        return {"/version": {"version": "0.32.0"}, "/v1/models": models, "/kv_event_sources": self._told}[path]

    async def text(self, path: str) -> str:
        return ""


@pytest.mark.parametrize(("ranks", "endpoint"), [(0, None), (1, "tcp://10.0.0.7:5557"), (2, None)])
async def test_caches_of_which_the_server_chooses_one_are_not_mirrored(
    ranks: int, endpoint: str | None, caplog: pytest.LogCaptureFixture
):
    facts = await VllmEngine(Sources(ranks)).facts()  # type: ignore[arg-type]
    assert (facts.kv_events.endpoint if facts.kv_events else None) == endpoint
    assert ("data-parallel" in caplog.text) == (ranks > 1)


def test_every_parameter_travels():
    asked = body(cache_salt="tenant")
    assert asked["sampling_params"] == {
        "max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
        "repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.3, "logit_bias": {"4": 1.5},
        "seed": 11, "logprobs": 3, "stop_token_ids": [9, 8], "ignore_eos": True, "detokenize": False,
        "allowed_token_ids": [4, 5, 8, 9],
    }  # fmt: skip
    assert (asked["cache_salt"], asked["token_ids"], asked["model"]) == ("tenant", [1, 2], "toy")
    assert asked["stream"] is True


def test_ignored_ends_are_not_sent_as_stop_tokens():
    params = SamplingParams(ignore_eos=True, eos_token_ids=(9,), stop_token_ids=(8,))
    assert body(params)["sampling_params"]["stop_token_ids"] == [8]


def test_nothing_but_named_fields_reaches_the_engine():
    assert set(body()) == {"request_id", "model", "token_ids", "sampling_params", "stream", "stream_options"}


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        (Grammar("json_schema", '{"type": "object"}'), {"json": {"type": "object"}}),
        (Grammar("json_object", ""), {"json_object": True}),
        (Grammar("regex", "a+"), {"regex": "a+"}),
        (Grammar("choice", '["a", "b"]'), {"choice": ["a", "b"]}),
        (Grammar("ebnf", "root ::= x"), {"grammar": "root ::= x"}),
        (Grammar("json_schema", "true", whitespace=""), {"json": True, "whitespace_pattern": ""}),
    ],
)
def test_grammars_keep_their_kind(grammar, expected):
    assert body(grammar=grammar)["sampling_params"]["structured_outputs"] == expected


def top(*rows: tuple[int, float, int | None]) -> list[dict[str, Any]]:
    return [{"token_id": token, "logprob": logprob, "rank": rank} for token, logprob, rank in rows]


def test_the_most_likely_tokens_are_told_without_the_drawn_one_that_is_not_among_them():
    row = {"token_id": 40, "logprob": -5.0, "rank": 9, "top_logprobs": top((40, -5.0, 9), (1, -0.5, 1), (2, -1.0, 2))}
    choice = {"token_ids": [40], "finish_reason": None, "logprobs": {"content": [row]}}
    (told,) = vllm_params.delta(choice, ALL).logprobs or ()
    assert (told.token_id, told.logprob, told.rank, told.top) == (40, -5.0, 9, ((1, -0.5), (2, -1.0)))


def test_an_abort_of_the_engine_is_no_end_of_the_output():
    with pytest.raises(StepFailed, match="abort"):
        vllm_params.delta({"token_ids": [], "finish_reason": "abort"}, ALL)


def test_cached_tokens_are_unknown_without_the_details():
    assert vllm_params.cached_tokens({"prompt_tokens": 3}) is None
    assert vllm_params.cached_tokens({"prompt_tokens_details": {"cached_tokens": 16}}) == 16
    assert vllm_params.cached_tokens({"prompt_tokens_details": {"cached_tokens": None}}) == 0


def test_an_error_behind_status_200_keeps_its_kind():
    assert isinstance(failure({"message": "no", "code": 400}), InvalidRequest)
    assert isinstance(failure({"message": "EngineCore died", "code": 500}), StepFailed)
    assert isinstance(failure("anything"), StepFailed)


def test_an_endpoint_bound_to_all_addresses_is_dialled_at_the_engine():
    assert reachable("tcp://*:5557", "10.0.0.7") == "tcp://10.0.0.7:5557"
    assert reachable("tcp://0.0.0.0:5557", "h") == "tcp://h:5557"
    assert reachable("tcp://10.1.1.1:5557", "h") == "tcp://10.1.1.1:5557"
