"""The sdist and the wheel: each file once, and nothing but kvferry in site-packages."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.check_wheel import WheelError, check_contents
from tests.deploy.binaries import ROOT

UV = Path(sys.executable).with_name("uv")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """sdist and wheel, the latter out of the former, without the compiled kernels."""
    folder = tmp_path_factory.mktemp("dist")
    command = [str(UV), "build", "--quiet", "--out-dir", str(folder), "-C", "wheel.cmake=false", "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def test_each_file_is_in_both_once(built: tuple[Path, Path]) -> None:
    assert "files in kvferry, kvferry-" in check_contents(*built)


def add_to_wheel(name: str) -> Callable[[Path, Path], None]:
    def change(sdist: Path, wheel: Path) -> None:
        with zipfile.ZipFile(wheel, "a") as archive:
            archive.writestr(name, "")

    return change


def empty_sdist(sdist: Path, wheel: Path) -> None:
    tarfile.open(sdist, "w:gz").close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (add_to_wheel("router/main.py"), "adds .*router.* to site-packages"),
        (add_to_wheel("kvferry/kernels/cpu/native/module.cpp"), "has .*module.cpp"),
        (empty_sdist, "the sdist lacks"),
    ],
)
def test_what_is_wrong_is_named(
    built: tuple[Path, Path], tmp_path: Path, change: Callable[[Path, Path], None], said: str
) -> None:
    copies = [Path(shutil.copy(path, tmp_path)) for path in built]
    change(*copies)
    with pytest.raises(WheelError, match=said):
        check_contents(*copies)
