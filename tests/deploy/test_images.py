"""The images' own builds, run here: kernels that do not compile fail one, and what is built is small and serves."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.deploy.binaries import ROOT
from tests.deploy.docker_plugins import composed
from tests.deploy.dockerfile import Instruction
from tests.deploy.image_build import ImageBuild
from tests.deploy.test_compose import FILES, GIVEN, serve

MB = 1_000_000
BASE = 140 * MB
"""What python:3.11-slim-bookworm unpacks to, and tini, with some to spare: no registry is asked here."""
LIMITS = {"Dockerfile.router": 230 * MB, "Dockerfile.worker": 1200 * MB}
SETTING = "KVFERRY_KERNELS_REQUIRED=1 "
FOLDER = ROOT / ".cache" / "images"


def build(made: ImageBuild, steps: Iterable[Instruction]) -> None:
    """Skips the test where the package index cannot be reached; a failure says what the step said."""
    try:
        for step in steps:
            made.take(step)
    except subprocess.CalledProcessError as error:
        if "No matching distribution" in error.output or "Failed to establish" in error.output:
            pytest.skip(f"cannot install: {error.output[-300:]}")
        pytest.fail(f"{error.cmd}\n{error.output[-3000:]}")


@pytest.mark.images
def test_kernels_that_do_not_compile_fail_the_image(tmp_path: Path) -> None:
    """The Dockerfile's own command, with a compiler that fails; without its setting the same gives a wheel."""
    made = ImageBuild("Dockerfile.worker", tmp_path)
    wheel = next(step for step in made.steps if "pip wheel" in step.text)
    before = made.steps[: made.steps.index(wheel)]
    build(made, [step for step in before if step.name != "RUN" or "/opt/build/bin/pip" in step.text])
    command = wheel.text.partition("&&")[0]
    made.env["CXX"] = "/bin/false"
    with pytest.raises(subprocess.CalledProcessError) as failed:
        made.shell(command)
    assert "CMake configuration failed" in failed.value.output
    assert not list(tmp_path.glob("wheels/*.whl"))
    assert SETTING in command
    made.shell(command.replace(SETTING, ""))
    (without,) = tmp_path.glob("wheels/*.whl")
    assert not [name for name in zipfile.ZipFile(without).namelist() if "_native" in name and name.endswith(".so")]


@pytest.fixture(scope="module")
def images() -> dict[str, ImageBuild]:
    """Both images' environments, built as their Dockerfiles say, with the demo model."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    arguments = {"DEMO_MODEL": "1", "VERSION": version}
    if "TORCH_INDEX_URL" in os.environ:
        arguments["TORCH_INDEX_URL"] = os.environ["TORCH_INDEX_URL"]
    made = {name: ImageBuild(name, FOLDER / name.rpartition(".")[2], **arguments) for name in LIMITS}
    for each in made.values():
        shutil.rmtree(each.root / "opt", ignore_errors=True)
        shutil.rmtree(each.root / "wheels", ignore_errors=True)
        build(each, each.steps)
    return made


@pytest.mark.images
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", LIMITS)
def test_the_image_is_small(images: dict[str, ImageBuild], name: str) -> None:
    environment = images[name].environment
    sizes = {path: path.lstat().st_size for path in environment.rglob("*")}
    model = sum(size for path, size in sizes.items() if path.suffix == ".gguf")
    router = name.endswith("router")
    print(f"{name}: {sum(sizes.values()) / MB:.0f} MB on top of its base, {model / MB:.0f} MB of it the demo model")
    assert (model < 3 * MB) == router, "a router needs the header alone"
    assert BASE + sum(sizes.values()) - model <= LIMITS[name]
    assert any(path.match("kernels/cpu/_native*.so") for path in sizes) != router
    assert any(path.match("protocol/_native*.so") for path in sizes)


@pytest.mark.images
@pytest.mark.timeout(1800)
def test_what_was_built_serves(images: dict[str, ImageBuild]) -> None:
    services = composed(FILES[0], GIVEN)["services"]
    found = {
        name: images[Path(service["build"]["dockerfile"]).name] for name, service in services.items() if name != "redis"
    }
    served = serve(services, {name: [str(made.environment / "bin" / "kvferry")] for name, made in found.items()})
    assert served["text"]
    assert "prefill" in served["route"]
