"""Clients of SGLang and llama.cpp: bodies that they send, and what the engines' chunks mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.engine_adapter.engine import EngineCall, EngineDelta
from kvferry.engine_adapter.engines import llamacpp, sglang
from kvferry.engine_adapter.engines.llamacpp import LlamaCppEngine
from kvferry.engine_adapter.engines.sglang import SglangEngine
from kvferry.protocol.errors import InvalidRequest, StepFailed
from kvferry.protocol.messages import Job
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.work import Generate, Grammar

PARAMS = SamplingParams(max_tokens=4, temperature=0.0, seed=3, eos_token_ids=(2,), stop_token_ids=(8,))


class Canned:
    """Answers a stream with these chunks."""

    def __init__(self, *chunks: dict[str, Any], tokens: dict[str, list[int]] | None = None) -> None:
        self.chunks, self.path, self.body = chunks, "", dict[str, Any]()
        self.tokens = tokens or {}

    async def post(self, path: str, body: Any) -> Any:
        assert path == "/tokenize"
        assert (body["add_special"], body["parse_special"]) == (False, False)
        return {"tokens": self.tokens[body["content"]]}

    async def stream(self, path: str, body: Any, deliver: Callable[[dict[str, Any]], None]) -> None:
        self.path, self.body = path, json.loads(json.dumps(body))
        for chunk in self.chunks:
            deliver(chunk)


async def answered(engine: Any, params: SamplingParams = PARAMS, **more: Any) -> list[EngineDelta]:
    deltas: list[EngineDelta] = []
    await engine.generate(EngineCall("r-0-1", (5, 6, 7), params, **more), deltas.append)
    return deltas


def sglang_chunk(ids: list[int], done: int, reason: Any = None, cached: int = 2) -> dict[str, Any]:
    return {
        "output_ids": ids,
        "meta_info": {"finish_reason": reason, "completion_tokens": done, "cached_tokens": cached},
    }


@pytest.mark.parametrize(
    "parts", [([10], [10, 11], [10, 11, 12]), ([10], [11], [12])], ids=["cumulative", "incremental"]
)
async def test_sglang_ids_are_delivered_once_whether_they_are_cumulative_or_not(parts):
    length = {"type": "length", "length": 3}
    chunks = [sglang_chunk(ids, at, length if at == 3 else None) for at, ids in enumerate(parts, start=1)]
    deltas = await answered(SglangEngine(Canned(*chunks)))  # type: ignore[arg-type]
    assert [delta.token_ids for delta in deltas] == [(10,), (11,), (12,)]
    assert [delta.finish_reason for delta in deltas] == [None, None, "length"]
    assert deltas[0].cached_tokens == 2


async def test_an_aborted_sglang_request_fails():
    chunk = sglang_chunk([], 0, {"type": "abort", "message": "out of memory", "status_code": 500})
    with pytest.raises(StepFailed, match="out of memory"):
        await answered(SglangEngine(Canned(chunk)))  # type: ignore[arg-type]
    with pytest.raises(StepFailed, match="without a finish reason"):
        await answered(SglangEngine(Canned(sglang_chunk([1], 1))))  # type: ignore[arg-type]


async def test_sglang_is_sent_tokens_salt_adapter_and_grammar():
    canned = Canned(sglang_chunk([2], 1, {"type": "stop", "matched": 2}))
    await answered(
        SglangEngine(canned),  # type: ignore[arg-type]
        grammar=Grammar("json_object", ""), adapter="lora", cache_salt="tenant",
    )  # fmt: skip
    assert canned.path == "/generate"
    assert canned.body["input_ids"] == [5, 6, 7]
    assert (canned.body["lora_path"], canned.body["cache_salt"], canned.body["rid"]) == ("lora", "tenant", "r-0-1")
    sampling = canned.body["sampling_params"]
    assert sampling["stop_token_ids"] == [2, 8]
    assert (sampling["ignore_eos"], sampling["top_k"], sampling["sampling_seed"]) == (True, -1, 3)
    assert json.loads(sampling["json_schema"]) == {"type": "object"}


async def test_sglang_logprobs_belong_to_the_new_tokens():
    params = SamplingParams(max_tokens=2, logprobs=1)
    first, second = sglang_chunk([10], 1), sglang_chunk([10, 11], 2, "length")
    first["meta_info"] |= {"output_token_logprobs": [(-0.1, 10, None)], "output_top_logprobs": [[(-0.1, 10, None)]]}
    second["meta_info"] |= {
        "output_token_logprobs": [(-0.1, 10, None), (-3.0, 11, None)],
        "output_top_logprobs": [[(-0.1, 10, None)], [(-0.2, 4, None)]],
    }
    deltas = await answered(SglangEngine(Canned(first, second)), params)  # type: ignore[arg-type]
    (row,) = deltas[1].logprobs or ()
    assert (row.token_id, row.logprob, row.rank, row.top) == (11, -3.0, 2, ((4, -0.2),))


def test_sglang_tells_where_its_events_are():
    told = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "replay_endpoint_port_base": 5558}
    found = sglang.event_source(told, "10.0.0.7")
    assert found is not None
    assert (found.endpoint, found.replay) == ("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558")
    assert sglang.event_source(None, "h") is None


async def test_llamacpp_ends_where_the_api_says_so():
    chunks = ({"tokens": [10], "stop": False}, {"tokens": [8], "stop": False}, {"tokens": [11], "stop": False})
    deltas = await answered(LlamaCppEngine(Canned(*chunks)))  # type: ignore[arg-type]
    assert [(delta.token_ids, delta.finish_reason) for delta in deltas] == [((10,), None), ((8,), "stop")]


async def test_llamacpp_tells_its_limit_and_what_it_reused():
    last = {"tokens": [], "stop": True, "stop_type": "limit", "timings": {"cache_n": 2}}
    deltas = await answered(LlamaCppEngine(Canned({"tokens": [10], "stop": False}, last)))  # type: ignore[arg-type]
    assert (deltas[-1].finish_reason, deltas[-1].cached_tokens) == ("length", 2)


async def test_llamacpp_names_all_samplers_and_keeps_tenants_apart():
    canned = Canned({"tokens": [2], "stop": False})
    await answered(LlamaCppEngine(canned), cache_salt="tenant")  # type: ignore[arg-type]
    body = canned.body
    assert (body["prompt"], body["n_predict"], body["return_tokens"]) == ([5, 6, 7], 4, True)
    assert (body["temperature"], body["top_k"], body["repeat_penalty"], body["min_p"]) == (0.0, 0, 1.0, 0.0)
    assert (body["mirostat"], body["dynatemp_range"], body["n_probs"]) == (0, 0.0, 0)
    assert body["cache_prompt"] is False
    assert llamacpp.body(EngineCall("r", (1,), PARAMS), 1024)["cache_prompt"] is True


def llamacpp_body(params: SamplingParams = PARAMS, grammar: Grammar | None = None) -> dict[str, Any]:
    return llamacpp.body(EngineCall("r", (1,), params, grammar), 1024)


def test_llamacpp_is_sent_only_what_it_accepts():
    """Builds of 2026 answer -1 with `Field 'repeat_last_n': Value must be between 0 <= value`, and 2**32 - 1 is the
    seed that stands for a random one."""
    assert llamacpp_body()["repeat_last_n"] == 1024
    seeds = [llamacpp_body(SamplingParams(seed=seed))["seed"] for seed in (-1, 2**32 - 1, 2**32, 2**63 - 1, 5)]
    assert all(0 <= seed < 2**32 - 1 for seed in seeds)
    assert seeds[-1] == 5
    assert [llamacpp_body(SamplingParams(logprobs=count))["n_probs"] for count in (0, 1, 3)] == [1, 1, 3]


def test_a_grammar_of_llamacpp_ends_its_output_itself():
    """A complete grammar under ignore_eos is `Unexpected empty grammar stack after accepting piece`, status 500."""
    ignoring = SamplingParams(ignore_eos=True)
    assert llamacpp_body(ignoring)["ignore_eos"] is True
    assert llamacpp_body(ignoring, Grammar("ebnf", 'root ::= "a"'))["ignore_eos"] is False


def test_any_json_of_the_api_is_not_llamacpps_any_object():
    assert "string" in llamacpp_body(grammar=Grammar("json_schema", "{}"))["json_schema"]["type"]
    assert llamacpp_body(grammar=Grammar("json_object", ""))["json_schema"] == {"type": "object"}


def predicted(content: str, tokens: list[int], count: int, **more: Any) -> dict[str, Any]:
    """An event as llama.cpp's server sends it."""
    return {"index": 0, "content": content, "tokens": tokens, "stop": False, "id_slot": -1,
            "tokens_predicted": count, "tokens_evaluated": 6, **more}  # fmt: skip


LAST = {"index": 0, "content": "", "tokens": [], "id_slot": 1, "stop": True, "tokens_predicted": 7,
        "tokens_evaluated": 6, "truncated": False, "stop_type": "limit", "stopping_word": "", "tokens_cached": 13,
        "timings": {"cache_n": 5, "prompt_n": 1}}  # fmt: skip


async def test_llamacpp_tokens_of_a_character_that_it_leaves_out_follow_from_the_text():
    """It streams ` 小` (13223, 125, 233) as its last token alone."""
    chunks = (predicted(".", [30], 1), predicted(" 小", [233], 4), predicted("荾", [139], 7), LAST)
    canned = Canned(*chunks, tokens={" 小": [13223, 125, 233], "荾": [179, 231, 139]})
    deltas = await answered(LlamaCppEngine(canned))  # type: ignore[arg-type]
    assert [delta.token_ids for delta in deltas] == [(30,), (13223, 125, 233), (179, 231, 139), ()]
    assert (deltas[-1].finish_reason, deltas[-1].cached_tokens) == ("length", 5)


async def test_llamacpp_logprobs_have_a_row_for_each_token_of_a_character():
    entry = {"id": 233, "token": "", "bytes": [143], "logprob": -0.25,
             "top_logprobs": [{"id": 9, "logprob": -0.125}, {"id": 233, "logprob": -0.25}]}  # fmt: skip
    chunk = predicted(" 小", [233], 3, completion_probabilities=[entry])
    canned = Canned(chunk, LAST, tokens={" 小": [13223, 125, 233]})
    (delta, _) = await answered(LlamaCppEngine(canned), SamplingParams(max_tokens=9, logprobs=1))  # type: ignore[arg-type]
    rows = delta.logprobs or ()
    assert [(row.token_id, row.logprob) for row in rows] == [(13223, 0.0), (125, 0.0), (233, -0.25)]
    assert (rows[2].rank, rows[2].top) == (2, ((9, -0.125),))


async def test_llamacpp_progress_of_the_prompt_is_no_token_and_tells_what_is_reused():
    """Its events carry `tokens: [0]`."""
    progress = predicted("", [0], 0, prompt_progress={"total": 25, "cache": 24, "processed": 24, "time_ms": 0})
    deltas = await answered(LlamaCppEngine(Canned(progress, predicted(" x", [2], 1))))  # type: ignore[arg-type]
    assert [(delta.token_ids, delta.finish_reason, delta.cached_tokens) for delta in deltas] == [((2,), "stop", 24)]


async def test_an_error_of_llamacpp_inside_an_answer_fails():
    with pytest.raises(StepFailed, match="decode failed"):
        await answered(LlamaCppEngine(Canned({"error": {"message": "decode failed", "code": 500}})))  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", [SglangEngine, LlamaCppEngine])
@pytest.mark.parametrize(
    ("params", "grammar", "name"),
    [
        (SamplingParams(bad_words=((1, 2),)), None, "bad_words"),
        (SamplingParams(allowed_token_ids=(1,)), None, "allowed_token_ids"),
        (SamplingParams(prompt_logprobs=1), None, "prompt_logprobs"),
        (SamplingParams(), Grammar("lark", "start: /a/"), "grammar"),
    ],
)
def test_what_an_engine_lacks_is_refused_by_name(engine, params, grammar, name):
    with pytest.raises(InvalidRequest) as refused:
        engine(Canned()).check(Job("r", 0, (1,), 1, Generate(params, grammar), "router"))
    assert refused.value.param == name
