"""GPUs of this machine, as the driver and the installed torch see them.

Except for `loaded`, nothing here imports torch or takes GPU memory."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path
from typing import Literal

Platform = Literal["cuda", "hip"]

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
"""AMD's compute driver has a folder here for each processor, with a file `properties`."""
INSTINCT = (90402, 90500)
"""Versions of gfx942 and gfx950 in those files; tests compile the kernels for them."""
CALLS: dict[Platform, tuple[str, ...]] = {
    "cuda": ("cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceTotalMem_v2"),
    "hip": ("hipInit", "hipGetDeviceCount", "hipDeviceGet", "hipDeviceTotalMem"),
}
"""Functions of the driver that count the GPUs and report their memory."""


def gpus() -> list[int]:
    """Return the total bytes of each visible GPU (CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES), in the driver's order.

    The list is empty without a GPU, or if torch cannot use one."""
    platform, folder = torch_build()
    driver = None if platform is None else _driver(platform, folder)
    if platform is None or driver is None:
        return []
    start, count_of, get, memory_of = (getattr(driver, name) for name in CALLS[platform])
    count, device, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    if start(0) or count_of(ctypes.byref(count)):
        return []
    found = []
    for index in range(count.value):
        if get(ctypes.byref(device), index) or memory_of(ctypes.byref(size), device):
            return []
        found.append(int(size.value))
    return found


def torch_build() -> tuple[Platform | None, Path]:
    """Return the platform for which the installed torch is built, None if only for CPUs, and its folder."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        version = Path(folder) / "version.py"
        if version.exists():
            text, platforms = version.read_text(), tuple(CALLS)
            built = [each for each in platforms if re.search(rf"^{each}\b[^=]*=\s*['\"]", text, re.MULTILINE)]
            return (built[0] if built else None), Path(folder)
    return None, Path()


def loaded() -> str:
    """Return the names of torch's GPUs, and the version of CUDA or ROCm. Imports torch, which must have a GPU."""
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if torch.version.hip is None:
        return f"{', '.join(names)}, CUDA {torch.version.cuda}"
    properties = [torch.cuda.get_device_properties(index) for index in range(len(names))]
    kinds = sorted({each.gcnArchName.partition(":")[0] for each in properties})
    return f"{', '.join(names)} ({', '.join(kinds)}), ROCm {torch.version.hip}"


def gpu_for_blocks(device: str) -> tuple[str, str]:
    """Return the first GPU that --device chooses and its platform for UCX, cuda or rocm; ("", "") on a CPU."""
    platform, _ = torch_build()
    if device == "cpu" or platform is None or not gpus():
        return "", ""
    return device if ":" in device else "cuda:0", "rocm" if platform == "hip" else "cuda"


def unused_gpu() -> str:
    """Return the build of torch, CUDA or ROCm, that would use a GPU of this machine and is missing; "" if none."""
    platform, _ = torch_build()
    if platform != "cuda" and NVIDIA_DRIVER.exists():
        return "CUDA"
    return "ROCm" if platform != "hip" and any(_version_of(node) in INSTINCT for node in AMD_NODES.glob("*")) else ""


def _driver(platform: Platform, folder: Path) -> ctypes.CDLL | None:
    """Load the driver's library; ROCm builds of torch bring theirs along."""
    names = ["libcuda.so.1"] if platform == "cuda" else [str(folder / "lib" / "libamdhip64.so"), "libamdhip64.so"]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _version_of(node: Path) -> int:
    """Return the architecture of one of the driver's nodes; 0 for a CPU."""
    try:
        found = re.search(r"^gfx_target_version (\d+)", (node / "properties").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0
