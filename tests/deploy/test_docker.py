"""The Dockerfiles, without a Docker engine: what they copy exists, what they run parses, who they run as."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

from cli.main import kvferry
from tests.deploy.binaries import ROOT
from tests.deploy.dockerfile import Dockerfile, reaches_build, read_dockerfile

DOCKER = ROOT / "deploy" / "docker"
FILES = ("Dockerfile.router", "Dockerfile.worker")


@pytest.fixture(params=FILES)
def dockerfile(request: pytest.FixtureRequest) -> Dockerfile:
    return read_dockerfile(DOCKER / request.param)


def test_two_stages_and_only_the_environment_travels(dockerfile: Dockerfile) -> None:
    build, image = dockerfile.stages
    assert build.alias == "build"
    assert build.image == image.image == "python:${PYTHON}-slim"
    copies = [item for item in image.instructions if item.name == "COPY"]
    assert [item.flags for item in copies] == [{"from": "build"}]
    assert copies[0].words == ["/opt/kvferry", "/opt/kvferry"]


def test_the_build_copies_what_dockerignore_lets_through(dockerfile: Dockerfile) -> None:
    copies = [item for item in dockerfile.of("COPY") if "from" not in item.flags]
    assert [item.words for item in copies] == [[".", "."]]
    assert not dockerfile.of("ADD")


def test_every_package_of_the_project_reaches_the_build_and_nothing_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["scikit-build"]["wheel"]["packages"]
    assert set(packages) == {path.parent.name for path in ROOT.glob("*/__init__.py")}
    files = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    wanted = {path for path in tracked() if path in files or path.split("/")[0] in packages}
    reaching = {path for path in tracked() if reaches_build(path, ignore_rules())}
    assert reaching == {path for path in wanted if not path.endswith("/.gitignore")}


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


def test_the_router_image_installs_no_torch_and_the_worker_installs_its_own_first() -> None:
    router, worker = (
        [item.text for item in read_dockerfile(DOCKER / name).of("RUN") if "pip install" in item.text] for name in FILES
    )
    assert not any("torch" in text or "worker" in text for text in router)
    order = [next(i for i, text in enumerate(worker) if part in text) for part in ('"$TORCH"', ".[$EXTRA]")]
    assert order == sorted(order)


def test_the_extra_that_the_worker_image_installs_exists() -> None:
    arguments = [item.text.partition("=") for item in read_dockerfile(DOCKER / "Dockerfile.worker").of("ARG")]
    defaults = {name: value for name, _, value in arguments}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {defaults["EXTRA"], "worker-cu13"} <= set(extras)


def test_base_dependencies_hold_no_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    heavy = ("torch", "transformers", "triton", "ucxx", "safetensors", "accelerate")
    assert not [name for name in project["dependencies"] if name.startswith(heavy)]


WITHOUT_WORKER_EXTRA = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "safetensors", "ucxx", "libucx", "triton", "accelerate"}:
            raise ModuleNotFoundError(f"No module named {name!r} (not in the router image)", name=name)

sys.meta_path.insert(0, Absent())
import cli.main
import router.main
cli.main.run(["router", "--help"])
"""


def test_the_router_starts_to_run_where_only_the_base_dependencies_exist() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_WORKER_EXTRA], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "--max-inflight" in done.stdout
