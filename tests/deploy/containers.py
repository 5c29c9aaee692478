"""A Docker engine, where one answers, and a compose file that runs in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.deploy.binaries import ROOT
from tests.deploy.docker_plugins import plugin

BUILD_S, UP_S = 3600, 900


def docker(*argv: str) -> str:
    """Output of the command. Raises CalledProcessError."""
    return subprocess.run(["docker", *argv], check=True, capture_output=True, text=True).stdout.strip()


def need_engine() -> None:
    """Skips the test where no Docker engine answers."""
    if shutil.which("docker") is None:
        pytest.skip("no docker")
    asked = subprocess.run(["docker", "info"], capture_output=True, text=True, timeout=60)
    if asked.returncode:
        pytest.skip(f"no Docker engine: {asked.stderr.strip()[-200:]}")


def make_images() -> None:
    """Both images with the demo model, as `make images` makes them of this checkout; BASE and TORCH_INDEX_URL of the
    environment reach the build."""
    done = subprocess.run(
        ["make", "-s", "images", "DEMO_MODEL=1"], cwd=ROOT, capture_output=True, text=True, timeout=BUILD_S
    )
    assert done.returncode == 0, done.stderr[-4000:]


def described(image: str) -> dict[str, Any]:
    return dict(json.loads(docker("image", "inspect", image))[0])


def added(image: str) -> int:
    """Bytes of an image's layers on top of its base, whatever that is: from the first that our Dockerfiles make."""
    total, shown = 0, "{{.Size}} {{.CreatedBy}}"
    for line in docker("history", "--no-trunc", "--human=false", "--format", shown, image).splitlines():
        size, _, command = line.partition(" ")
        total += int(size)
        if "install-debian" in command:
            return total
    pytest.fail(f"no layer of {image} is of our Dockerfile")


class Project:
    """A compose file's services under a project name of their own."""

    def __init__(self, name: str, file: str, env: dict[str, str]) -> None:
        self._words = [str(plugin("docker-compose")), "-p", name, "-f", str(ROOT / "deploy" / "compose" / file)]
        self._env = {**os.environ, **env}

    def compose(self, *argv: str, timeout: float = UP_S) -> str:
        """What docker compose prints of these arguments, which it must accept."""
        done = subprocess.run([*self._words, *argv], env=self._env, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout.strip()

    def inside(self, service: str, *argv: str) -> subprocess.CompletedProcess[str]:
        """A command in the container of a service."""
        words = [*self._words, "exec", "-T", service, *argv]
        return subprocess.run(words, env=self._env, capture_output=True, text=True, timeout=60)

    def containers(self) -> dict[str, dict[str, Any]]:
        """What the engine says of each service's container, ended ones too."""
        ids = self.compose("ps", "-a", "-q").split()
        found = json.loads(docker("inspect", *ids)) if ids else []
        return {each["Config"]["Labels"]["com.docker.compose.service"]: each for each in found}


@contextmanager
def up(name: str, file: str, env: dict[str, str]) -> Iterator[Project]:
    """All services, healthy; gone afterwards with their volumes."""
    project = Project(name, file, env)
    try:
        try:
            project.compose("up", "--detach", "--wait", "--no-build", "--pull", "missing")
        except AssertionError as error:
            pytest.fail(f"{error}\n{project.compose('logs', '--tail', '40')[-6000:]}")
        yield project
    finally:
        project.compose("down", "--volumes", "--timeout", "30")
