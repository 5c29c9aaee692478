"""GPUs as drivers and torch that are made up see them."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli import gpu_detection
from kvferry.cli.gpu_detection import gpus, torch_build, unused_gpu

GIB = 1024**3


class Driver:
    """What the driver's library answers on a machine with these GPUs."""

    def __init__(self, sizes: Sequence[int], broken: bool = False) -> None:
        self._sizes, self._broken = sizes, broken

    def cuInit(self, flags: int) -> int:
        return 100 if self._broken else 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self._sizes)
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = index
        return 0

    def cuDeviceTotalMem_v2(self, size: Any, device: Any) -> int:
        size._obj.value = self._sizes[device.value]
        return 0


class AmdDriver(Driver):
    """The same under AMD's names."""

    hipInit, hipGetDeviceCount = Driver.cuInit, Driver.cuDeviceGetCount
    hipDeviceGet, hipDeviceTotalMem = Driver.cuDeviceGet, Driver.cuDeviceTotalMem_v2


def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    """Install a torch with this text in its version.py."""
    (tmp_path / "version.py").write_text(text)
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)


CUDA = "debug = False\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
ROCM = "debug = False\ncuda: Optional[str] = None\nhip: Optional[str] = '7.0.51831'\n"
CPU = "debug = False\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"


@pytest.mark.parametrize(
    ("text", "expected"), [(CUDA, "cuda"), ('cuda = "12.8"\n', "cuda"), (ROCM, "hip"), (CPU, None)]
)
def test_torch_s_build_is_read_without_importing_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, expected: str | None
) -> None:
    install(monkeypatch, tmp_path, text)
    assert torch_build() == (expected, tmp_path)


@pytest.mark.parametrize(("text", "kind", "library"), [(CUDA, Driver, "libcuda.so"), (ROCM, AmdDriver, "libamdhip64")])
def test_gpus_are_asked_of_the_driver_where_torch_can_use_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, kind: type[Driver], library: str
) -> None:
    install(monkeypatch, tmp_path, text)
    for driver, expected in ((kind([7, 9 * GIB]), [7, 9 * GIB]), (kind([7], broken=True), []), (kind([]), [])):

        def load(name: str, driver: Driver = driver) -> Driver:
            assert library in name
            return driver

        monkeypatch.setattr(ctypes, "CDLL", load)
        assert gpus() == expected
    install(monkeypatch, tmp_path, CPU)
    assert gpus() == []


def test_a_build_of_torch_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """AMD's library is looked for in torch's folder first, then in the system's."""
    tried: list[str] = []

    def missing(name: str) -> None:
        tried.append(name)
        raise OSError(name)

    install(monkeypatch, tmp_path, ROCM)
    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert gpus() == []
    assert tried == [str(tmp_path / "lib" / "libamdhip64.so"), "libamdhip64.so"]


@pytest.mark.parametrize(
    ("text", "nvidia", "version", "expected"),
    [
        (CPU, True, 0, "CUDA"),
        (CPU, False, 90402, "ROCm"),
        (CPU, False, 90500, "ROCm"),
        (CPU, False, 90012, ""),  # graphics of a desktop processor
        (CPU, False, None, ""),
        (ROCM, False, 90402, ""),
        (CUDA, False, 90402, "ROCm"),
        (CUDA, True, 0, ""),
    ],
)
def test_a_gpu_that_torch_cannot_use_asks_for_another_build(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, nvidia: bool, version: int | None, expected: str
) -> None:
    install(monkeypatch, tmp_path, text)
    driver, nodes = tmp_path / "nvidia", tmp_path / "nodes"
    monkeypatch.setattr(gpu_detection, "NVIDIA_DRIVER", driver)
    monkeypatch.setattr(gpu_detection, "AMD_NODES", nodes)
    if nvidia:
        driver.touch()
    for name, found in (("0", 0), ("1", version)):
        (nodes / name).mkdir(parents=True)
        if found is not None:
            (nodes / name / "properties").write_text(f"simd_count 0\ngfx_target_version {found}\nlocal_mem_size 0\n")
    assert unused_gpu() == expected
