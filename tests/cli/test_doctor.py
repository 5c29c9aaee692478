"""The doctor's findings, each on a machine that is made up or broken on purpose."""

from __future__ import annotations

import http.server
import socket
import sys
import threading
import types
from typing import Any

import pytest

from kvferry.cli import doctor, preflight
from kvferry.cli.check_result import Result
from kvferry.cli.doctor import all_checks, report
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.settings import ServeSettings
from tests.object_store import s3
from tests.redis_servers import redis_server


def one(check, **settings) -> Result:
    (result,) = all_checks(ServeSettings(**settings), [("name", check)])
    return result


def fake_torch(monkeypatch, *names: str, cuda: str | None = "13.0", hip: str | None = None) -> None:
    devices = types.SimpleNamespace(
        is_available=lambda: bool(names),
        device_count=lambda: len(names),
        get_device_name=lambda index: names[index],
        get_device_properties=lambda index: types.SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-"),
    )
    torch = types.SimpleNamespace(cuda=devices, version=types.SimpleNamespace(cuda=cuda, hip=hip))
    monkeypatch.setitem(sys.modules, "torch", torch)


def test_threads_beyond_the_cores_are_a_warning(monkeypatch):
    monkeypatch.setattr(doctor, "available_cores", lambda: 4)
    assert one(doctor.threads, threads=4).level == "ok"
    assert "--threads 4" in one(doctor.threads, threads=5).remedy
    assert one(doctor.threads, threads=2, tensor_parallel_size=2).level == "ok"
    assert "--threads 2" in one(doctor.threads, threads=3, tensor_parallel_size=2).remedy
    assert "fewer ranks" in one(doctor.threads, threads=1, tensor_parallel_size=5).remedy


def test_ranks_divide_the_heads():
    needs: list[Any] = [
        types.SimpleNamespace(kv_heads=heads, planes=2, layers=1, experts=8, shapes=()) for heads in (4, 6)
    ]
    preflight.ranks(ServeSettings(tensor_parallel_size=2), needs)
    preflight.ranks(ServeSettings(), needs)
    with pytest.raises(ConfigError, match="4 does not divide the model's K/V heads: 6"):
        preflight.ranks(ServeSettings(tensor_parallel_size=4), needs)
    latent: Any = types.SimpleNamespace(kv_heads=1, planes=1, layers=1, experts=8, shapes=())
    preflight.ranks(ServeSettings(tensor_parallel_size=4), [latent])


def test_expert_parallelism_is_of_ranks_and_experts():
    needs: list[Any] = [
        types.SimpleNamespace(kv_heads=4, planes=2, layers=1, experts=count, shapes=()) for count in (8, 0)
    ]
    preflight.ranks(ServeSettings(tensor_parallel_size=2, enable_expert_parallel=True), needs[:1])
    with pytest.raises(ConfigError, match="enable-expert-parallel needs --tensor-parallel-size 2 or more"):
        preflight.ranks(ServeSettings(enable_expert_parallel=True), needs[:1])
    with pytest.raises(ConfigError, match="the model has no experts") as raised:
        preflight.ranks(ServeSettings(tensor_parallel_size=2, enable_expert_parallel=True), needs)
    assert raised.value.param == "enable_expert_parallel"


def test_a_store_is_tried_and_left_as_it_was(tmp_path, monkeypatch):
    assert "--kv-remote-url" in one(doctor.store).found
    found = one(doctor.store, kv_remote_url=f"file://{tmp_path}/blocks")
    assert (found.level, list((tmp_path / "blocks").iterdir())) == ("ok", [])
    assert "not one of s3://" in one(doctor.store, kv_remote_url="ftp://host").found
    with s3(monkeypatch) as address:
        assert one(doctor.store, kv_remote_url=address).level == "ok"
        found = one(doctor.store, kv_remote_url="s3://no-such-bucket/folder")
        assert (found.level, "permissions" in found.remedy) == ("fail", True)


def test_model():
    assert one(doctor.model, model=("/no/such/model.gguf",)).level == "fail"


def test_weights_and_pools_must_fit_together(monkeypatch):
    monkeypatch.setattr("kvferry.cli.resource_plan._kernels_are_compiled", lambda: True)
    monkeypatch.setattr("psutil.virtual_memory", lambda: types.SimpleNamespace(available=11 * 1024**3))
    fits = {"device": "cpu", "prefill": 3, "decode": 2, "kv_cache_gib": 2.0}
    assert one(doctor.memory, **fits).level == "ok"
    failure = one(doctor.memory, **fits | {"decode": 3})
    assert failure.level == "fail"
    assert "lower --kv-cache-gib to less than 1.8" in failure.found


def test_without_a_model_memory_is_checked_and_speed_is_unknown():
    assert one(doctor.memory, device="cpu", kv_cache_gib=1e6).level == "fail"
    nowhere = {"device": "cpu", "model": "/no/such/model.gguf"}
    unsure = one(doctor.memory, **nowhere)
    assert (unsure.level, unsure.remedy) == ("warn", "see the line about the model")
    assert unsure.found.endswith("before weights of unknown size"), "its weights are not 0 bytes"
    speed = one(doctor.speed, **nowhere)
    assert "unknown" in speed.found
    assert "the model" in speed.remedy


def test_redis():
    assert one(doctor.redis).found.endswith("valkey-server")
    result = one(doctor.redis, redis_url="redis://127.0.0.1:1/0")
    assert result.level == "fail"
    assert "--redis-url" in result.found
    assert one(doctor.redis, redis_url="nonsense").level == "fail"
    result = one(doctor.redis, redis_url="redis://:hunter2@127.0.0.1:1/0")
    assert "redis://:***@127.0.0.1:1/0" in result.found
    assert "hunter2" not in result.found
    with redis_server() as server:
        found = one(doctor.redis, redis_url=server.url)
        assert (found.level, found.found.split()[0]) == ("warn", "Valkey")
        assert found.found.endswith(
            f"at {server.url} takes commands without a password from every user of this machine"
        )
        with server.client() as client:
            client.config_set("requirepass", "hunter2")
        found = one(doctor.redis, redis_url=server.url.replace("//", "//:hunter2@"))
        assert (found.level, found.found.split()[0]) == ("ok", "Valkey")
        assert "hunter2" not in found.found


def test_missing_packages_name_the_extra(monkeypatch):
    monkeypatch.setattr(preflight, "WORKER_PACKAGES", ("torch", "no_such_package"))
    result = one(doctor.packages)
    assert result.level == "fail"
    assert "no_such_package" in result.found
    assert "kvferry[worker]" in result.found


def test_port_free_taken_and_answering():
    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert "free" in one(doctor.port, port=port).found
    with http.server.HTTPServer(("127.0.0.1", 0), Health) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert "/health" in one(doctor.port, port=server.server_port).found
        finally:
            server.shutdown()
            thread.join()
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        result = one(doctor.port, port=mute.getsockname()[1])
    assert result.level == "fail"
    assert "--port" in result.found


def test_gpu(monkeypatch):
    fake_torch(monkeypatch, "H200", "H200")
    assert one(doctor.gpu).found == "H200, H200, CUDA 13.0"
    fake_torch(monkeypatch, "AMD Instinct MI300X", "AMD Instinct MI300X", cuda=None, hip="7.0.51831")
    assert one(doctor.gpu).found == "AMD Instinct MI300X, AMD Instinct MI300X (gfx942), ROCm 7.0.51831"
    fake_torch(monkeypatch)
    monkeypatch.setattr(doctor, "unused_gpu", str)
    assert one(doctor.gpu).level == "ok"
    monkeypatch.setattr(doctor, "unused_gpu", lambda: "ROCm")
    assert one(doctor.gpu).remedy == "install a ROCm build of torch"
    assert one(doctor.gpu, device="cuda:1").level == "fail"


def test_transfer_uses_the_link_s_settings(monkeypatch):
    def self_test(transports, net_devices):
        if transports == "broken":
            raise ConfigError("the self-test failed; try --ucx-transports tcp")
        return types.SimpleNamespace(describe=lambda: f"moved over {transports} on {net_devices}")

    monkeypatch.setitem(sys.modules, "kvferry.kv_transfer.selftest", types.SimpleNamespace(self_test=self_test))
    assert one(doctor.transfer, ucx_transports="tcp", ucx_net_devices="lo").found == "moved over tcp on lo"
    assert one(doctor.transfer, ucx_transports="broken").level == "fail"


def test_one_broken_check_does_not_hide_the_rest(capsys):
    def refuse(settings):
        raise ConfigError("no such model; name another")

    def explode(settings):
        raise ImportError("libfoo.so")

    def warn(settings):
        return Result("warn", "warn", "slow", "buy a faster one")

    def fine(settings):
        return Result("ok", "fine", "good")

    checks = [("refuse", refuse), ("explode", explode), ("warn", warn), ("fine", fine)]
    assert report(all_checks(ServeSettings(), checks)) == 1
    assert capsys.readouterr().out.splitlines() == [
        "fail refuse       no such model; name another",
        "fail explode      ImportError: libfoo.so -> reinstall the package named in the error",
        "warn warn         slow -> buy a faster one",
        "ok   fine         good",
    ]
    assert report(all_checks(ServeSettings(), checks[2:])) == 0


def test_what_fails_several_checks_is_told_once(capsys):
    def refuse(settings):
        raise ConfigError("a does not go with b")

    checks = [("model", refuse), ("memory", refuse)]
    assert report(all_checks(ServeSettings(), checks)) == 2
    assert capsys.readouterr().out.splitlines() == [
        "fail model        a does not go with b",
        "warn memory       unknown -> see the line about the model",
    ]


def test_real_redis_and_ports_of_preflight(tmp_path):
    port = preflight.free_port("127.0.0.1", 0)
    assert preflight.free_port("127.0.0.1", port) == port
    with pytest.raises(ConfigError, match="--host"):
        preflight.free_port("no.such.host.invalid", 0)
    preflight.readable("", "chat-template")
    with pytest.raises(ConfigError, match="--chat-template"):
        preflight.readable(str(tmp_path / "none"), "chat-template")


def test_the_syntax_of_calls_is_shown():
    found = one(doctor.tools)
    assert found.level == "ok"
    assert "knows no tools, so the prompt describes tools in Hermes' syntax; no reasoning" in found.found


def test_a_derived_syntax_is_shown_by_example(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% if tools %}{{ tools }}{% endif %}{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}"
        "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<call>"
        "{{ c.function.name }}#{{ loop.index0 }}<args>{{ c.function.arguments | tojson }}</call>{% endfor %}</turn>"
        "{% endfor %}"
    )
    found = one(doctor.tools, chat_template=str(template))
    assert found.level == "ok"
    assert "<call>NAME#0<args>{…}</call> (JSON, several calls, numbered calls)" in found.found
    assert found.found.endswith("reasoning <think> … </think>")
    template.write_text(template.read_text().replace("| tojson", "| length"))
    found = one(doctor.tools, chat_template=str(template))
    assert (found.level, "shows no calls that can be read" in found.found) == ("warn", True)
