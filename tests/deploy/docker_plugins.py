"""docker compose and docker buildx without a Docker engine: what they make of a file needs none.

Fetched once from Debian into `.cache/`, and checked by hash: what a machine has may be too old to read these files."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.binaries import CACHE, ROOT

POOL = "http://deb.debian.org/debian/pool/main/d"
PACKAGES = {
    "docker-compose": (
        "docker-compose/docker-compose_2.26.1-4_amd64.deb",
        "47681197cb2b1ab88206b42a1a92fc75f50d9530a6322d03494a473eed0408ea",
    ),
    "docker-buildx": (
        "docker-buildx/docker-buildx_0.13.1+ds1-3_amd64.deb",
        "fcf8c48204d1603c8f209451d7827eb91bf30759578baf7704e9e1a87e5f1d7f",
    ),
}
FETCH_TIMEOUT_S = 120


@functools.cache
def plugin(name: str) -> Path:
    """The program of one of docker's commands. Skips the test where it cannot be had."""
    path, digest = PACKAGES[name]
    target = CACHE / name
    if not target.exists():
        if platform.machine() != "x86_64" or shutil.which("dpkg") is None:
            pytest.skip(f"no {name}: Debian's package is for amd64, and dpkg unpacks it")
        try:
            _fetch(f"{POOL}/{path}", digest, name, target)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"no {name}: {error}")
    return target


def composed(file: str, env: dict[str, str]) -> dict[str, Any]:
    """What docker compose makes of a file of deploy/compose with these variables and all profiles."""
    path = ROOT / "deploy" / "compose" / file
    done = run(plugin("docker-compose"), "-f", str(path), "--profile", "*", "config", "--format", "json", env=env)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def run(program: Path, *argv: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """In the repository, with these variables alone."""
    given = {"PATH": os.environ["PATH"], "HOME": str(CACHE), **env}
    return subprocess.run([program, *argv], cwd=ROOT, env=given, capture_output=True, text=True, timeout=60)


def _fetch(url: str, digest: str, name: str, target: Path) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        package = Path(folder) / "package.deb"
        with urllib.request.urlopen(url, timeout=FETCH_TIMEOUT_S) as answer:
            package.write_bytes(answer.read())
        if hashlib.sha256(package.read_bytes()).hexdigest() != digest:
            raise OSError(f"{url} is not what it was")
        subprocess.run(["dpkg", "-x", package, folder], check=True, capture_output=True, timeout=FETCH_TIMEOUT_S)
        os.replace(next(Path(folder).glob(f"usr/libexec/docker/cli-plugins/{name}")), target)
