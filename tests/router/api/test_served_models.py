from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.model_files.model_name import ModelName
from kvferry.protocol.errors import InvalidRequest, ModelNotFound
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.router.api.bodies.completions import CompletionBody
from kvferry.router.api.bodies.generating import ChatBody
from kvferry.router.api.served_models import ServedModel, ServedModels
from kvferry.router.request_context import RequestContext
from kvferry.router.text.encoding import Encoder
from kvferry.router.text.renderer import Renderer
from tests.api_parts import FakeCluster, demo_text, ids_of, says

CALL = RequestContext("c", arrival=1.0, deadline=2.0)


def pool(name: str, max_model_len: int = 4096) -> ServedModel:
    text = replace(demo_text(), called=ModelName(name))
    return ServedModel(
        text,
        FakeCluster(says("x"), max_model_len=max_model_len),
        RouterMetrics().of(name),
        Encoder(text),
        Renderer(text.template),
    )


def test_pools_are_found_by_name_and_the_first_is_meant_without_one() -> None:
    small, large = pool("small"), pool("large")
    pools = ServedModels(small, large)
    assert [each.name for each in pools] == ["small", "large"]
    assert pools.pool("large") is large
    assert pools.pool(None) is pools.pool("") is pools.pool("small") is small
    with pytest.raises(ModelNotFound, match="'small', 'large'"):
        pools.pool("other")
    assert pools.ready() == {"small": {"prefill": 0, "decode": 1}, "large": {"prefill": 0, "decode": 1}}


def test_a_pool_is_as_long_as_its_nodes_and_its_model_allow() -> None:
    assert pool("p", max_model_len=100).max_model_len == 100
    assert pool("p", max_model_len=10**6).max_model_len == demo_text().facts.max_model_len


async def test_a_spec_for_each_prompt_and_a_name_for_each_spec() -> None:
    body = CompletionBody(prompt=["one", [5, 6]], max_tokens=3, seed=9, cache_salt="salt")
    first, second = await pool("p").specs(CALL, body)
    assert (first.token_ids, second.token_ids) == (tuple(ids_of("one")), (5, 6))
    assert (first.request_id, second.request_id) == ("c-p0", "c-p1")
    assert {first.call, second.call} == {CALL}
    assert {first.namespace, second.namespace} == {"0:salt"}
    assert (first.params.seed, first.params.max_tokens) == (9, 3)


async def test_the_shape_s_default_bounds_the_output() -> None:
    (text,) = await pool("p").specs(CALL, CompletionBody(prompt="a"))  # type: ignore[arg-type]
    (chat,) = await pool("p").specs(CALL, ChatBody(messages=[{"role": "user", "content": "a"}]))
    assert text.params.max_tokens == 16
    assert chat.params.max_tokens == 4096 - len(chat.token_ids)
    with pytest.raises(InvalidRequest, match="maximum context length is 4 tokens") as caught:
        await pool("p", 4).specs(CALL, CompletionBody(prompt="a b c d e f"))  # type: ignore[arg-type]
    assert caught.value.param == "prompt"
