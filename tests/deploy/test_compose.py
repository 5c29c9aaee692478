"""The compose files: what docker compose makes of them, and whether it serves."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.main import kvferry
from kvferry.cli.options import ENV_PREFIX, variable
from kvferry.cli.preflight import valkey_binary
from tests.deploy.binaries import CACHE, ROOT
from tests.deploy.docker_plugins import composed, plugin, run
from tests.deploy.dockerfile import read_dockerfile

FILES = ("compose.yaml", "compose.two-hosts.yaml")
SECRET = {"KVFERRY_CLUSTER_SECRET": "0123456789abcdef0123456789abcdef"}
HOSTS = {"PREFILL_HOST": "10.9.0.1", "DECODE_HOST": "10.9.0.2", "REDIS_PASSWORD": "unguessed"}
GIVEN = {**SECRET, **HOSTS}
SPARE_S = 15


@pytest.fixture(params=FILES)
def services(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(composed(request.param, GIVEN)["services"])


def settings(service: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the service's own command line makes of its command and environment."""
    for name, value in service["environment"].items():
        monkeypatch.setenv(name, value)
    command, *flags = service["command"]
    return kvferry.commands[command].make_context(command, flags).params


def image_of(service: dict[str, Any]) -> Any:
    return read_dockerfile(ROOT / service["build"]["dockerfile"])


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("missing", GIVEN)
def test_what_has_no_default_is_asked_for(file: str, missing: str) -> None:
    if file == FILES[0] and missing in HOSTS:
        assert composed(file, {name: value for name, value in GIVEN.items() if name != missing})
        return
    given = {name: value for name, value in GIVEN.items() if name != missing}
    path = ROOT / "deploy" / "compose" / file
    done = run(plugin("docker-compose"), "-f", str(path), "--profile", "*", "config", env=given)
    assert done.returncode != 0
    assert missing in done.stderr


def test_commands_and_variables_are_the_command_line_s(
    services: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {variable(option.name) for command in kvferry.commands.values() for option in command.params if option.name}
    assert set(services) == {"redis", "router", "prefill", "decode"}
    for name in ("router", "prefill", "decode"):
        with monkeypatch.context() as patch:
            found = settings(services[name], patch)
        assert {key for key in services[name]["environment"] if key.startswith(ENV_PREFIX)} <= known
        assert found["cluster_secret"] == SECRET["KVFERRY_CLUSTER_SECRET"]
        wait = found["request_timeout" if name == "router" else "drain_timeout"]
        minutes, seconds = services[name]["stop_grace_period"].removesuffix("s").split("m")
        assert int(minutes) * 60 + int(seconds) >= wait + SPARE_S


def test_services_have_no_more_than_they_need(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert int(service["user"].partition(":")[0]) > 0
        assert name != "redis" or "ports" not in service
        if name != "redis":
            assert service["user"] == image_of(service).user


def test_redis_lets_the_other_containers_in(services: dict[str, Any]) -> None:
    """By a password, or by being told that none is needed: by default it answers its own container alone."""
    command = services["redis"]["command"]
    settings = {name: value for name, value in pairwise(command) if name.startswith("--")}
    assert "--requirepass" in settings or settings.get("--protected-mode") == "no"


def test_only_this_machine_reaches_the_router_until_it_is_told_otherwise() -> None:
    one, two = (composed(file, GIVEN)["services"]["router"] for file in FILES)
    assert [port["host_ip"] for port in one["ports"]] == ["127.0.0.1"]
    assert "--host=127.0.0.1" in two["command"]
    opened = composed(FILES[0], {**GIVEN, "KVFERRY_LISTEN": "0.0.0.0:80", "KVFERRY_API_KEY": "k"})["services"]["router"]
    assert [(port["host_ip"], port["published"]) for port in opened["ports"]] == [("0.0.0.0", "80")]
    assert opened["environment"]["KVFERRY_API_KEY"] == "k"


def test_images_are_those_of_this_version_wherever_they_come_from() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for file in FILES:
        for given, start in (({}, ""), ({"KVFERRY_REGISTRY": "ghcr.io/me/"}, "ghcr.io/me/")):
            images = {name: each["image"] for name, each in composed(file, {**GIVEN, **given})["services"].items()}
            assert images["router"] == f"{start}kvferry/router:{version}"
            assert images["prefill"] == images["decode"] == f"{start}kvferry/worker:{version}"


def test_each_host_starts_its_own_part(services: dict[str, Any]) -> None:
    profiles = {name: service.get("profiles") for name, service in services.items()}
    if services["redis"].get("network_mode") == "host":
        assert profiles == {name: ["decode" if name == "decode" else "prefill"] for name in services}
    else:
        assert set(profiles.values()) == {None}


def test_volumes_are_folders_that_the_image_gives_to_its_user(services: dict[str, Any]) -> None:
    for name in ("router", "prefill", "decode"):
        made = next(item.text for item in image_of(services[name]).of("RUN") if "install -d -o kvferry" in item.text)
        assert {volume["target"] for volume in services[name]["volumes"]} <= set(made.split())


@pytest.mark.images
@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", FILES)
def test_what_a_file_starts_serves_from_a_read_only_root(file: str) -> None:
    services, here = composed(file, GIVEN)["services"], [str(Path(sys.executable).with_name("kvferry"))]
    served = serve(services, dict.fromkeys(services, here))
    assert served["text"]
    assert "prefill" in served["route"]
    assert "decode" in served["route"]


def serve(services: dict[str, Any], programs: dict[str, list[str]]) -> dict[str, str]:
    """One completion of these services, each with its command and environment, on a host of their own."""
    description = CACHE / "services.json"
    images = {name: image_of(service).environment for name, service in services.items() if name != "redis"}
    described = {"programs": programs, "valkey": str(valkey_binary()), "services": services, "images": images}
    CACHE.mkdir(parents=True, exist_ok=True)
    description.write_text(json.dumps(described))
    volumes = {volume["target"] for service in services.values() for volume in service.get("volumes", ())}
    on_a_host = [
        shutil.which("unshare") or "unshare",
        "-mnpf",
        "--kill-child",
        "--mount-proc",
        "sh",
        str(ROOT / "tests" / "deploy" / "compose_host.sh"),
    ]
    arguments = [f"{HOSTS['PREFILL_HOST']} {HOSTS['DECODE_HOST']}", f"127.0.0.1 localhost {' '.join(services)}"]
    if subprocess.run([*on_a_host, *arguments, "", "true"], capture_output=True).returncode:
        pytest.skip("needs to be root, to make a host of its own")
    run_them = [sys.executable, "-m", "tests.deploy.compose_services", str(description)]
    done = subprocess.run(
        [*on_a_host, *arguments, " ".join(sorted(volumes)), *run_them],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))
