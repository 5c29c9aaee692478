"""Engines that change between prefill and decode: what an adapter asks them, and what it makes of each answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvferry.cli.engine_doctor import check_engine
from kvferry.cli.engines import checked_engines
from kvferry.engine_adapter.engine import ElasticEngine, EngineFacts
from kvferry.engine_adapter.engines.sglang import SglangEngine
from kvferry.engine_adapter.engines.sglang_roles import current_mode
from kvferry.engine_adapter.http_client import EngineHttp
from kvferry.engine_adapter.identity import first_role
from kvferry.engine_adapter.main import engine_client, serve_adapter
from kvferry.engine_adapter.node_loading import require_elastic
from kvferry.protocol.errors import ConfigError, InvalidRequest, Overloaded, StepFailed
from kvferry.protocol.node_settings import AdapterSettings
from kvferry.protocol.settings import ServeSettings
from tests.cli.test_engine_doctor import serving
from tests.engine_adapter.mock_sglang import Behaviour, Server, app_of


@asynccontextmanager
async def sglang(mode: str = "prefill", switch: str = "on") -> AsyncIterator[tuple[SglangEngine, Server]]:
    server = Server(Behaviour(mode=mode, switch=switch), 8998)
    async with serving(app_of(server)) as url:
        engine = SglangEngine(EngineHttp(url))
        yield engine, server
        await engine.close()


def test_the_role_is_what_the_ranks_say_not_what_the_server_was_started_with():
    assert current_mode({"disaggregation_mode": "prefill"}) == "prefill"
    states = [{"disaggregation_mode": "decode"}, {"disaggregation_mode": "decode"}]
    assert current_mode({"disaggregation_mode": "prefill", "internal_states": states}) == "decode"
    states[1] = {"disaggregation_mode": "prefill"}
    assert current_mode({"disaggregation_mode": "prefill", "internal_states": states}) == "null"
    assert current_mode({"disaggregation_mode": "prefill", "internal_states": [{}]}) == "prefill"
    assert current_mode({}) == "null"


async def test_an_engine_changes_its_role_and_draws_rooms_only_as_a_prefill_engine() -> None:
    async with sglang("decode") as (engine, server):
        assert (await engine.facts()).kv_role == "decode"
        with pytest.raises(ConfigError):
            engine.room("h")
        await engine.switch_role("prefill")
        assert server.behaviour.mode == "prefill"
        assert (await engine.facts()).kv_role == "prefill"
        assert "8998" in engine.room("h")


async def test_a_busy_engine_is_overloaded_and_a_full_one_refuses() -> None:
    async with sglang() as (engine, server):
        server.running = 1
        with pytest.raises(Overloaded, match="not idle"):
            await engine.switch_role("decode")
        server.running, server.behaviour.switch = 0, "full"
        with pytest.raises(InvalidRequest, match="headroom"):
            await engine.switch_role("decode", 4.0)
        assert server.behaviour.mode == "prefill"


@pytest.mark.parametrize("told", [None, [], {"success": False, "message": "x"}, {"success": True, "new_role": "null"}])
async def test_an_answer_that_does_not_confirm_the_role_is_a_failure(told: object) -> None:
    class Http:
        async def post(self, path: str, body: object, silence_s: float) -> object:
            assert (path, body) == ("/pd_role_switch", {"new_role": "decode"})
            return told

    with pytest.raises(StepFailed, match="change of its role"):
        await SglangEngine(Http()).switch_role("decode")  # type: ignore[arg-type]


@pytest.mark.parametrize(("switch", "why"), [("off", "not set on this instance"), ("absent", "404")])
async def test_an_engine_without_the_flag_is_refused_in_plain_words(switch: str, why: str) -> None:
    async with sglang(switch=switch) as (engine, server):
        with pytest.raises(ConfigError, match="start SGLang with --enable-pd-role-switch") as refused:
            await require_elastic(engine, "prefill", 0.0)
        assert why in refused.value.message
        assert refused.value.param == "elastic"
        server.behaviour.switch = "on"
        await require_elastic(engine, "prefill", 0.0)
        assert server.behaviour.mode == "prefill"


@pytest.mark.parametrize("kind", ["vllm", "llamacpp", "openai"])
async def test_other_engines_are_refused_by_name(kind: str) -> None:
    settings = AdapterSettings(engine=kind, url="http://127.0.0.1:1", elastic=True)
    with pytest.raises(ConfigError, match=f"{kind} cannot change between prefill and decode; only SGLang can"):
        await serve_adapter(settings)
    engine = engine_client(kind, settings.url, settings)
    assert not isinstance(engine, ElasticEngine)
    with pytest.raises(ConfigError, match="cannot change"):
        await require_elastic(engine, "decode", 0.0)


def test_serve_refuses_elastic_engines_of_others() -> None:
    with pytest.raises(ConfigError, match="kvferry adapt --engine sglang --elastic"):
        checked_engines(ServeSettings(engine="sglang", attach=("http://127.0.0.1:1",), elastic=True))


def test_an_elastic_node_joins_in_the_role_that_its_engine_has() -> None:
    facts = EngineFacts("sglang", "0.5.23", "1", "toy", ("toy",), 64, 16, kv_role="decode")
    assert first_role(facts, "prefill", elastic=True) == "decode"
    with pytest.raises(ConfigError):
        first_role(facts, "prefill", elastic=False)
    whole = EngineFacts("sglang", "0.5.23", "1", "toy", ("toy",), 64, 16)
    assert first_role(whole, "decode", elastic=False) == "decode"
    with pytest.raises(ConfigError, match="--enable-pd-role-switch"):
        first_role(whole, "decode", elastic=True)


@pytest.mark.parametrize(
    ("switch", "elastic", "level", "found"),
    [("on", False, "warn", "and can change it"), ("off", False, "warn", "and cannot change it"),
     ("off", True, "fail", "--enable-pd-role-switch is not set"), ("on", True, "warn", "and can change it")],
)  # fmt: skip
async def test_doctor_says_whether_an_engine_can_change(switch: str, elastic: bool, level: str, found: str) -> None:
    server = Server(Behaviour(mode="decode", switch=switch), 8998)
    async with serving(app_of(server)) as url:
        result = await check_engine(ServeSettings(engine="sglang", elastic=elastic), url)
    assert (result.level, found in result.found) == (level, True), result
    assert ("--enable-pd-role-switch" in result.remedy) == (switch == "off")


async def test_doctor_says_that_a_whole_engine_cannot_change() -> None:
    async with serving(app_of(Server(Behaviour(), 8998))) as url:
        result = await check_engine(ServeSettings(engine="sglang", elastic=True), url)
    assert (result.level, "cannot change" in result.found) == ("fail", True)
    assert "--enable-pd-role-switch" in result.remedy
