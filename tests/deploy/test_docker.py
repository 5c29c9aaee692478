"""The Dockerfiles, without a Docker engine: what they copy exists, what they run parses, who they run as."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvferry.cli.main import kvferry
from tests.deploy.binaries import ROOT
from tests.deploy.dockerfile import Dockerfile, reaches_build, read_dockerfile
from tests.test_floors import WORKERS

DOCKER = ROOT / "deploy" / "docker"
FILES = ("Dockerfile.router", "Dockerfile.worker")


@pytest.fixture(params=FILES)
def dockerfile(request: pytest.FixtureRequest) -> Dockerfile:
    return read_dockerfile(DOCKER / request.param)


def test_two_stages_and_only_the_environment_travels(dockerfile: Dockerfile) -> None:
    build, image = dockerfile.stages
    assert build.alias == "build"
    assert build.image == image.image == "${BASE}", "or a release could not pin it by digest"
    copies = [item for item in image.instructions if item.name == "COPY"]
    assert [item.flags for item in copies] == [{"from": "build"}]
    assert copies[0].words == ["/opt/kvferry", "/opt/kvferry"]


def test_the_build_copies_what_dockerignore_lets_through(dockerfile: Dockerfile) -> None:
    copies = [item for item in dockerfile.of("COPY") if "from" not in item.flags]
    assert [item.words for item in copies] == [["deploy/docker", "/docker"], [".", "."]]
    assert not dockerfile.of("ADD")


def test_every_package_of_the_project_reaches_the_build_and_nothing_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = set(project["tool"]["scikit-build"]["wheel"]["packages"].values())
    assert packages == {path.parent.name for path in ROOT.glob("*/__init__.py")}
    files = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    wanted = {path for path in tracked() if path in files or path.split("/")[0] in packages}
    reaching = {path for path in tracked() if reaches_build(path, ignore_rules())}
    steps = {path for path in reaching if path.startswith("deploy/")}
    assert reaching - steps == {path for path in wanted if not path.endswith("/.gitignore")}
    assert {str(Path(path).parent) for path in steps} == {"deploy/docker", "deploy/docker/locked"}
    assert not [path for path in steps if "Dockerfile" in path], "a change of one would build the other anew"


@pytest.mark.parametrize(
    "path",
    [
        ".git/config",
        ".env",
        ".venv/bin/python",
        "key.pem",
        "build/kvferry.whl",
        "router/__pycache__/main.cpython-311.pyc",
        "router/api/__pycache__/app.cpython-311.pyc",
        "router/left.pyc",
        "kernels/cpu/_native.cpython-311-x86_64-linux-gnu.so",
        "protocol/_native.cpython-311-x86_64-linux-gnu.so",
        "kernels/cpu/native/CMakeCache.txt",
        "kernels/cpu/native/CMakeFiles/3.28/CMakeSystem.cmake",
    ],
)
def test_what_was_built_here_stays_out_of_the_build(path: str) -> None:
    assert not reaches_build(path, ignore_rules())


def ignore_rules() -> list[str]:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines() or pytest.skip("no git checkout")


def test_runs_without_root_under_an_init(dockerfile: Dockerfile) -> None:
    user, _, group = dockerfile.user.partition(":")
    assert int(user) >= 1000
    assert int(group) >= 1000
    assert dockerfile.entrypoint[:2] == ["tini", "--"]
    assert any(" tini" in item.text for item in dockerfile.of("RUN"))


def test_entrypoint_and_command_parse(dockerfile: Dockerfile) -> None:
    program, command, *flags = [*dockerfile.entrypoint[2:], *dockerfile.command]
    assert program == "kvferry"
    context = kvferry.commands[command].make_context(command, flags)
    assert context.params["host"] == "0.0.0.0"
    ports = {context.params["port"], context.params.get("link_port", context.params["port"])}
    exposed = {int(word) for item in dockerfile.of("EXPOSE") for word in item.words}
    assert 0 not in ports
    assert ports <= exposed


def test_nothing_is_installed_but_what_is_locked(dockerfile: Dockerfile) -> None:
    """By hash, from wheels, or made here; so that the same sources give the same image."""
    found = [
        part for item in dockerfile.of("RUN") for part in item.text.split("&&") if re.search(r"pip.* install ", part)
    ]
    assert len(found) >= 4
    for part in found:
        assert "--no-index" in part or {"--require-hashes", "-r"} <= set(part.split()), part
        assert "--no-compile" in part or "/opt/build/" in part, "bytecode is slim.py's"
    for file in re.findall(r"/docker/(locked/[\w.-]+\.txt)", " ".join(found)):
        assert (DOCKER / file).exists()


def test_images_ask_that_their_kernels_compile() -> None:
    """What that does is tried in test_images.py."""
    (rule,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]["overrides"]
    assert rule == {"if": {"failed": True, "env": {"KVFERRY_KERNELS_REQUIRED": False}}, "wheel": {"cmake": False}}
    (wheel,) = [
        item.text for item in read_dockerfile(DOCKER / "Dockerfile.worker").of("RUN") if "pip wheel" in item.text
    ]
    assert wheel.startswith("KVFERRY_KERNELS_REQUIRED=1 ")


def test_what_is_tried_is_what_is_installed_and_not_the_sources_that_lie_there(dockerfile: Dockerfile) -> None:
    tried = re.findall(r"/opt/kvferry/bin/python +(\S+) ", " ".join(item.text for item in dockerfile.of("RUN")))
    assert {flag for flag in tried if flag not in ("install", "uninstall", "check")} <= {"-P"}


def test_only_the_worker_image_installs_torch_and_takes_it_from_where_it_is_told() -> None:
    router, worker = (" ".join(item.text for item in read_dockerfile(DOCKER / name).of("RUN")) for name in FILES)
    assert "torch" not in router.lower()
    assert '--index-url "$TORCH_INDEX_URL" -r /docker/locked/$TORCH.txt' in worker
    assert arguments("Dockerfile.worker")["TORCH_INDEX_URL"] == "https://download.pytorch.org/whl/cpu"


def test_every_set_that_the_worker_image_can_install_exists() -> None:
    bake = json.loads((DOCKER / "bake.json").read_text())["target"]["worker-cuda"]["args"]
    for given in (arguments("Dockerfile.worker"), {**arguments("Dockerfile.worker"), **bake}):
        assert (DOCKER / "locked" / f"{given['LOCK']}.txt").exists()
        assert not given["TORCH"] or (DOCKER / "locked" / f"{given['TORCH']}.txt").exists()


def test_the_rocm_image_has_the_cpu_worker_s_set_with_another_torch() -> None:
    baked = json.loads((DOCKER / "bake.json").read_text())
    target = baked["target"]["worker-rocm"]
    assert target["args"]["TORCH"] == "torch-rocm"
    assert target["args"]["TORCH_INDEX_URL"] == "${ROCM_INDEX_URL}"
    assert "LOCK" not in target["args"]
    assert arguments("Dockerfile.worker")["LOCK"] == "worker"
    assert target["platforms"] == ["linux/amd64"], "torch has ROCm builds for no other"
    assert baked["variable"]["ROCM_INDEX_URL"]["default"] == "", "its version is the operator's choice"
    assert "worker-rocm" not in baked["group"]["release"]["targets"]


@pytest.mark.parametrize("index", ["", "https://index.example/rocm"])
@pytest.mark.parametrize("written", [False, True])
def test_a_build_without_its_lock_or_index_says_what_is_missing(index: str, written: bool, tmp_path: Path) -> None:
    (check,) = [
        item.text for item in read_dockerfile(DOCKER / "Dockerfile.worker").of("RUN") if "is missing" in item.text
    ]
    if written:
        (tmp_path / "torch-rocm.txt").touch()
    env = {"PATH": os.environ["PATH"], "TORCH": "torch-rocm", "TORCH_INDEX_URL": index}
    done = subprocess.run(
        ["sh", "-c", check.replace("/docker/locked", str(tmp_path))], env=env, capture_output=True, text=True
    )
    assert (done.returncode == 0) is (bool(index) and written)
    assert ("make lock" in done.stderr) is (done.returncode != 0)


def test_the_image_says_what_it_is(dockerfile: Dockerfile) -> None:
    labels = dict(word.split("=", 1) for item in dockerfile.of("LABEL") for word in item.words)
    for name, value in (("version", "${VERSION}"), ("revision", "${REVISION}"), ("base.name", "${BASE}")):
        assert labels[f"org.opencontainers.image.{name}"] == value
    assert {"title", "description", "licenses"} <= {name.rpartition(".")[2] for name in labels}
    said = [item.text for item in dockerfile.of("RUN") if "--version" in item.text]
    assert said == ['[ -z "$VERSION" ] || [ "$(/opt/kvferry/bin/kvferry --version)" = "kvferry $VERSION" ]']


def test_the_health_check_is_a_command_of_ours_that_parses(dockerfile: Dockerfile) -> None:
    (check,) = dockerfile.of("HEALTHCHECK")
    program, command, *flags = json.loads(check.text.removeprefix("CMD "))
    assert program == "kvferry"
    assert kvferry.commands[command].make_context(command, flags).params["pid"] == 1
    assert set(check.flags) == {"interval", "timeout", "start-period", "retries"}


@pytest.mark.parametrize("wanted", ["20261101T000000Z", ""])
def test_debian_s_packages_can_be_those_of_a_day(tmp_path: Path, wanted: str) -> None:
    sources = tmp_path / "debian.sources"
    sources.write_text("URIs: http://deb.debian.org/debian\nSuites: x\nURIs: http://deb.debian.org/debian-security\n")
    done = install_debian(tmp_path, sources, wanted)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "asked").read_text().splitlines()[-1] == "install -y --no-install-recommends tini"
    hosts = re.findall("^URIs: http://(.*)", sources.read_text(), re.MULTILINE)
    where = [f"snapshot.debian.org/archive/debian{kind}/{wanted}" for kind in ("", "-security")]
    assert hosts == (where if wanted else ["deb.debian.org/debian", "deb.debian.org/debian-security"])


def test_a_day_that_no_source_takes_fails_the_build(tmp_path: Path) -> None:
    sources = tmp_path / "debian.sources"
    sources.write_text("URIs: http://mirror.example/debian\n")
    assert install_debian(tmp_path, sources, "20261101T000000Z").returncode != 0


def install_debian(folder: Path, sources: Path, snapshot: str) -> subprocess.CompletedProcess[str]:
    """The script with programs that do nothing in place of apt-get and rm."""
    for name, text in (("apt-get", f'echo "$@" >> {folder}/asked'), ("rm", "true")):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "APT_SOURCES": str(sources), "DEBIAN_SNAPSHOT": snapshot}
    return subprocess.run([DOCKER / "install-debian", "tini"], env=env, capture_output=True, text=True)


def arguments(name: str) -> dict[str, str]:
    """The build arguments of a Dockerfile with their defaults."""
    found = [item.text.partition("=") for item in read_dockerfile(DOCKER / name).of("ARG")]
    return {key: value.strip('"') for key, equals, value in found if equals}


def test_base_dependencies_hold_no_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [name for name in project["dependencies"] if name.startswith(tuple(WORKERS))]


WITHOUT_WORKER_EXTRA = f"""
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {WORKERS}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (not in the router image)", name=name)

sys.meta_path.insert(0, Absent())
import kvferry.cli.main
import kvferry.structured_output.checker_process
import kvferry.router.main
import kvferry.router.text.render_process
import kvferry.engine_adapter.main
import kvferry.engine_adapter.zmq_events
kvferry.cli.main.run(["router", "--help"])
"""


def test_routers_and_adapters_start_to_run_where_only_the_router_image_s_packages_exist() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_WORKER_EXTRA], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "--max-inflight" in done.stdout
