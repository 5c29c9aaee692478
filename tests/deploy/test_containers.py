"""The images in a Docker engine, and the compose file with them. Skipped where no engine answers: what the images'
builds do is tried without one, too, in test_images.py."""

from __future__ import annotations

import subprocess
import threading
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import APIStatusError, OpenAI
from openai.types.chat import ChatCompletion

from tests.deploy.binaries import ROOT
from tests.deploy.containers import Project, added, described, docker, make_images, need_engine, up
from tests.deploy.test_compose import SECRET
from tests.deploy.test_images import BASE, LIMITS, MB

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
MODEL = 94 * MB
"""The demo model's weights, which a release has not."""
NAME = "SmolLM2-135M-Instruct"
OWN = ("router", "prefill", "decode")
pytestmark = [pytest.mark.images, pytest.mark.timeout(5400)]


@pytest.fixture(scope="module", autouse=True)
def images() -> None:
    need_engine()
    make_images()


@pytest.fixture(scope="module")
def project() -> Iterator[Project]:
    given = {**SECRET, "KVFERRY_LISTEN": "127.0.0.1:0", "KVFERRY_TAG": VERSION}
    with up("kvferry-test", "compose.yaml", given) as made:
        yield made


@pytest.mark.parametrize("name", ["router", "worker"])
def test_an_image_is_small_and_says_what_it_is(name: str) -> None:
    found = described(f"kvferry/{name}:{VERSION}")
    own = added(f"kvferry/{name}:{VERSION}") - (MODEL if name == "worker" else 0)
    print(f"{name}: {found['Size'] / MB:.0f} MB, {own / MB:.0f} MB of them ours without the demo model's weights")
    assert BASE + own <= LIMITS[f"Dockerfile.{name}"]
    assert found["Config"]["User"] == "10001:10001"
    labels = {key.removeprefix("org.opencontainers.image."): said for key, said in found["Config"]["Labels"].items()}
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)
    assert (labels["version"], labels["revision"]) == (VERSION, head.stdout.strip())
    assert labels["base.name"]


@pytest.mark.parametrize("name", ["router", "worker"])
def test_an_image_runs_with_nothing_but_its_files(name: str) -> None:
    image = f"kvferry/{name}:{VERSION}"
    confined = ("run", "--rm", "--read-only", "--cap-drop", "ALL", "--network", "none")
    assert docker(*confined, image, "--version") == f"kvferry {VERSION}"
    assert docker(*confined, "--entrypoint", "id", image, "-u") == "10001"
    as_root = ("run", "--rm", "--network", "none", "--user", "0", "--entrypoint", "find", image)
    written = docker(*as_root, "/", "-xdev", "-type", "d", "-perm", "-o+w")
    assert set(written.split()) <= {"/tmp", "/var/tmp", "/run/lock"}


@pytest.mark.parametrize("name", ["router", "worker"])
def test_an_image_has_the_bytecode_of_what_it_runs(name: str) -> None:
    """Its root is read-only, so that what is not compiled there is compiled at each start and each health check."""
    code = (
        "import os, sys, importlib.util as u, kvferry.cli.main, kvferry.cli.health\n"
        "files = [str(getattr(each, '__file__', '')) for each in list(sys.modules.values())]\n"
        "print(*(f for f in files if f.endswith('.py') and not os.path.exists(u.cache_from_source(f))))"
    )
    python = ("--entrypoint", "/opt/kvferry/bin/python", f"kvferry/{name}:{VERSION}", "-P", "-c", code)
    assert docker("run", "--rm", "--network", "none", *python) == ""


def test_a_chat_through_the_compose_file(project: Project) -> None:
    answer = chat(project, "Say hello.")
    assert answer.choices[0].message.content
    assert answer.usage
    assert answer.usage.completion_tokens > 1
    with client_of(project) as client:
        assert [model.id for model in client.models.list()] == [NAME]


def test_a_schema_through_a_router_without_numpy(project: Project) -> None:
    """Its grammar is tried in the router's container before any node compiles it."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "number", "schema": schema}}
    assert '"n"' in (chat(project, "A number.", response_format=wanted).choices[0].message.content or "")
    assert project.inside("router", "/opt/kvferry/bin/python", "-c", "import numpy").returncode


def test_containers_are_as_confined_as_the_file_says(project: Project) -> None:
    for service in OWN:
        assert project.inside(service, "id", "-u").stdout.strip() == "10001"
        written = project.inside(service, "touch", "/opt/kvferry/x")
        assert written.returncode
        assert "Read-only file system" in written.stderr
        status = project.inside(service, "cat", "/proc/1/status").stdout
        assert "CapEff:\t0000000000000000" in status
        assert "NoNewPrivs:\t1" in status
        assert project.inside(service, "kvferry", "health", "--ready").returncode == 0


@pytest.mark.parametrize("service", ["prefill", "decode"])
def test_a_process_that_is_killed_starts_again_and_no_answer_breaks(project: Project, service: str) -> None:
    """In its container, so that the engine restarts it. Without its only decode node the router holds requests for
    --queue-timeout, which a slow machine may need more than: a refusal by then is one that says so."""
    over = threading.Event()

    def ask(number: int) -> list[str]:
        answers: list[str] = []
        while not over.is_set():
            try:
                answers.append(chat(project, f"Story {number}-{len(answers)}.").choices[0].finish_reason)
            except APIStatusError as error:
                answers.append(str(error.status_code))
        return answers

    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ask, number) for number in range(3)]
        time.sleep(2)
        before = project.containers()[service]["RestartCount"]
        assert project.inside(service, "sh", "-c", "kill -9 $(cat /proc/1/task/1/children)").returncode in (0, 137)
        until = time.monotonic() + 120
        while not (found := project.containers()[service])["RestartCount"] > before or not healthy(found):
            assert time.monotonic() < until, found["State"]
            time.sleep(0.5)
        over.set()
    answers = [answer for each in asked for answer in each.result()]
    print(f"{service}: {len(answers)} answers")
    assert set(answers) <= {"stop", "length"} | ({"503"} if service == "decode" else set())
    assert "length" in answers


def healthy(container: dict[str, Any]) -> bool:
    return bool(container["State"].get("Health", {}).get("Status") == "healthy")


def test_a_stop_ends_each_process_by_itself_and_in_order(project: Project) -> None:
    """The last test of the project. A worker finishes and leaves; nothing is killed."""
    began = time.monotonic()
    project.compose("stop")
    print(f"stopped in {time.monotonic() - began:.0f} s")
    ended = {name: each["State"]["ExitCode"] for name, each in project.containers().items()}
    assert {ended[name] for name in OWN} == {0}, ended


def chat(project: Project, text: str, **fields: object) -> ChatCompletion:
    with client_of(project) as client:
        return client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": text}],
            max_tokens=20,
            temperature=0,
            extra_body=fields,
        )


def client_of(project: Project) -> OpenAI:
    address = project.compose("port", "router", "8000")
    return OpenAI(base_url=f"http://{address}/v1", api_key="none", timeout=120, max_retries=0)
