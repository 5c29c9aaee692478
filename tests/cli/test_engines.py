"""Command lines of `kvferry serve` with engines of others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.cli.engines import checked_engines, engine_commands
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.settings import ServeSettings

FOLDER = Path("/run/kvferry-folder")


def commands(settings: ServeSettings) -> dict[str, list[str]]:
    found = engine_commands(settings, "/models/toy", "toy", lambda subcommand: ["kvferry", subcommand], FOLDER)
    return {command.name: list(command.argv) for command in found}


def after(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_each_engine_gets_an_adapter_that_knows_its_address_and_events() -> None:
    found = commands(ServeSettings(engine="vllm", decode=2, engine_python="/v/python", engine_args="--max-num-seqs 8"))
    assert list(found) == ["engine-0", "engine-1", "adapter-0", "adapter-1"]
    for number in range(2):
        engine, adapter = found[f"engine-{number}"], found[f"adapter-{number}"]
        assert engine[0] == "/v/python"
        assert engine[-2:] == ["--max-num-seqs", "8"]
        assert after(adapter, "--url").endswith(f":{after(engine, '--port')}")
        events = json.loads(after(engine, "--kv-events-config"))
        assert events["endpoint"] == after(adapter, "--kv-events") == f"ipc://{FOLDER}/events-{number}"
        assert events["replay_endpoint"] == after(adapter, "--kv-events-replay")
        assert after(adapter, "--node-id") == f"adapter-{number}"
        assert after(adapter, "--served-model-name") == "toy"
    assert after(found["engine-0"], "--port") != after(found["engine-1"], "--port")


def test_attached_engines_are_not_started() -> None:
    urls = ("http://10.0.0.1:8000", "http://10.0.0.2:8000")
    found = commands(ServeSettings(engine="sglang", attach=urls))
    assert list(found) == ["adapter-0", "adapter-1"]
    assert [after(argv, "--url") for argv in found.values()] == list(urls)
    assert all("--kv-events" not in argv for argv in found.values())


def test_llamacpp_has_no_events() -> None:
    found = commands(ServeSettings(engine="llamacpp", engine_python="/l/llama-server"))
    assert found["engine-0"][0] == "/l/llama-server"
    assert after(found["engine-0"], "-m") == "/models/toy"
    assert "--kv-events" not in found["adapter-0"]


def test_an_openai_server_s_adapter_knows_the_tokenizer() -> None:
    settings = ServeSettings(engine="openai", attach=("http://127.0.0.1:1",), engine_model="gpt")
    adapter = commands(settings)["adapter-0"]
    assert (after(adapter, "--tokenizer"), after(adapter, "--engine-model")) == ("/models/toy", "gpt")
    assert "--tokenizer" not in commands(ServeSettings(engine="vllm", attach=("http://h:1",)))["adapter-0"]


def test_an_engine_s_key_is_on_no_command_line() -> None:
    settings = ServeSettings(engine="vllm", attach=("http://127.0.0.1:1",), engine_api_key="a secret key")
    (adapter,) = engine_commands(settings, "/m", "toy", lambda subcommand: ["kvferry", subcommand], FOLDER)
    assert "a secret key" not in adapter.argv
    assert adapter.env["KVFERRY_ENGINE_API_KEY"] == "a secret key"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (ServeSettings(attach=("http://h:1",)), "--attach needs --engine"),
        (ServeSettings(engine="openai"), "--engine openai needs --attach"),
        (ServeSettings(engine="vllm", model=("a", "b")), "single model"),
        (ServeSettings(engine="sglang", prefill_engines=1), "--prefill-engines needs --engine vllm"),
        (ServeSettings(engine="vllm", attach=("http://a:1",), prefill_engines=1), "leaves none"),
    ],
)
def test_what_cannot_be_is_refused(settings: ServeSettings, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked_engines(settings)


def test_nodes_are_counted_by_the_attached_engines() -> None:
    checked = checked_engines(ServeSettings(engine="vllm", attach=("http://a:1", "http://b:1", "http://c:1")))
    assert (checked.prefill, checked.decode) == (0, 3)


def test_prefill_engines_and_the_others_transfer_blocks_over_ports_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvferry.cli.engines.has_gpu", lambda: False)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    settings = ServeSettings(engine="vllm", prefill_engines=1, decode=2, kv_lease=20.0)
    made = engine_commands(settings, "/m", "toy", lambda subcommand: ["kvferry", subcommand], FOLDER)
    engines, adapters = made[:3], made[3:]
    for engine in engines:
        config = json.loads(after(list(engine.argv), "--kv-transfer-config"))
        assert (config["kv_connector"], config["kv_load_failure_policy"]) == ("NixlConnector", "recompute")
        assert config["kv_buffer_device"] == "cpu"
        assert config["kv_connector_extra_config"] == {"kv_lease_duration": 20.0}
        assert engine.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert len({engine.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for engine in engines}) == 3
    assert ["prefill" if "prefill" in adapter.argv else "decode" for adapter in adapters] == [
        "prefill",
        "decode",
        "decode",
    ]
    assert all(after(list(adapter.argv), "--kv-lease") == "20.0" for adapter in adapters)
    assert all(after(list(adapter.argv), "--kv-transfer") == "nixl" for adapter in adapters)
    monkeypatch.setattr("kvferry.cli.engines.has_gpu", lambda: True)
    first, *_ = engine_commands(settings, "/m", "toy", lambda subcommand: ["kvferry", subcommand], FOLDER)
    assert "kv_buffer_device" not in json.loads(after(list(first.argv), "--kv-transfer-config"))
    assert "VLLM_CPU_OMP_THREADS_BIND" not in first.env


def test_without_prefill_engines_nothing_is_transferred() -> None:
    found = engine_commands(ServeSettings(engine="vllm"), "/m", "toy", lambda each: ["kvferry", each], FOLDER)
    assert all("--kv-transfer-config" not in command.argv and not command.env.get("UCX_TLS") for command in found)
    assert all("VLLM_NIXL_SIDE_CHANNEL_PORT" not in command.env for command in found)


def test_the_first_attached_engines_prefill() -> None:
    urls = ("http://a:1", "http://b:1", "http://c:1")
    settings = checked_engines(ServeSettings(engine="vllm", attach=urls, prefill_engines=1))
    assert (settings.prefill, settings.decode) == (1, 2)
    found = commands(settings)
    assert [after(argv, "--role") if "--role" in argv else "decode" for argv in found.values()] == [
        "prefill", "decode", "decode"
    ]  # fmt: skip
