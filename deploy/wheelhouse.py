"""Collects the wheels that a cluster needs beside torch, for a machine without a network.

    python deploy/wheelhouse.py --list > have.txt                    # there: what it has
    python deploy/wheelhouse.py --have have.txt --python 3.12 house  # here: what it lacks, as wheels in house/
    python deploy/wheelhouse.py --have have.txt --slim house         # or unpacked and slimmed, as house.tar.gz

There, run `pip install --no-index --no-deps house/*.whl`, or unpack the archive and put its folder on PYTHONPATH.
Versions are those that the images install (deploy/docker/locked); torch, Triton and CUDA's libraries are never
included. --slim removes files that no run reads, as the images do. Needs pip and the package `packaging`."""

from __future__ import annotations

import argparse
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib.metadata import distributions
from pathlib import Path

LOCKED = Path(__file__).parent / "docker" / "locked"
NEVER = re.compile(r"torch|triton|nvidia-.*|cuda-(bindings|core|pathfinder|toolkit)|setuptools")
"""Packages of the machine's own CUDA, which are never included."""
OLDEST_GLIBC = 5
"""Oldest minor version of glibc 2 in wheel tags: 2.5."""


def normal(name: str) -> str:
    """Normalise a name as PEP 503 does."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(locked: str, python: str, machine: str) -> dict[str, str]:
    """Return versions by name of what a list of deploy/docker/locked installs on Linux with a Python such as 3.12."""
    from packaging.requirements import Requirement

    environment = {
        "python_version": python,
        "python_full_version": f"{python}.99",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": machine,
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    found = {}
    for line in locked.splitlines():
        if "==" not in line or line.startswith(("#", " ")):
            continue
        wanted = Requirement(line.rstrip("\\ "))
        if wanted.marker is None or wanted.marker.evaluate(environment):
            found[normal(wanted.name)] = next(iter(wanted.specifier)).version
    return found


def not_installed(pinned: dict[str, str], have: Iterable[str]) -> list[str]:
    """Return the missing requirements. have: names, or lines of `pip freeze`."""
    there = {normal(re.split(r"[=@ ]", line.strip())[0]) for line in have if line.strip()}
    return [f"{name}=={version}" for name, version in pinned.items() if name not in there and not NEVER.fullmatch(name)]


def options(python: str, machine: str, glibc: int) -> list[str]:
    """Return options that make pip take only wheels of that Python and platform. glibc: 36 for 2.36."""
    names = [f"manylinux_2_{minor}" for minor in range(glibc, OLDEST_GLIBC - 1, -1)]
    platforms = [f"--platform={name}_{machine}" for name in (*names, "manylinux2014", "manylinux2010", "manylinux1")]
    return ["--no-deps", "--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *platforms]


def pip(command: str, pip_options: Sequence[str]) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check", *pip_options], check=True
    )


def slim_archive(pip_options: Sequence[str], target: Path) -> Path:
    """Return an archive of what these options of pip install, small."""
    slim = runpy.run_path(str(Path(__file__).parent / "docker" / "slim.py"))
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / target.name
        pip("install", ["--target", str(site), "--no-compile", *pip_options])
        for step in ("remove_unused", "link_duplicates", "strip"):
            slim[step](site)
        return Path(shutil.make_archive(str(target), "gztar", folder, target.name))


def main() -> None:
    parser = argparse.ArgumentParser(description="wheels for a machine without a network")
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--list", action="store_true", help="print the packages installed on this machine, for --have")
    parser.add_argument(
        "--have", type=Path, help="file with the packages installed on the target machine, as --list prints them"
    )
    parser.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}")
    parser.add_argument("--machine", choices=("x86_64", "aarch64"), default="x86_64")
    parser.add_argument(
        "--glibc", type=int, default=36, help="minor version of glibc on the target machine (ldd --version)"
    )
    parser.add_argument(
        "--extra",
        choices=("worker", "worker-cu13"),
        default="worker-cu13",
        help="extra of kvferry that matches torch's CUDA version",
    )
    parser.add_argument("--slim", action="store_true")
    args = parser.parse_args()
    if args.list:
        print(*sorted({normal(each.metadata["Name"]) for each in distributions()}), sep="\n")
        return
    if args.folder is None:
        parser.error("give the folder for the wheels")
    have = args.have.read_text().splitlines() if args.have else []
    wanted = not_installed(pins((LOCKED / f"{args.extra}.txt").read_text(), args.python, args.machine), have)
    print(f"{len(wanted)} packages for Python {args.python} on {args.machine}: {' '.join(wanted)}")
    pip_options = [*options(args.python, args.machine, args.glibc), *wanted]
    if args.slim:
        made = slim_archive(pip_options, args.folder)
        print(f"{made}: {made.stat().st_size / 1e6:.0f} MB")
        return
    pip("download", ["--dest", str(args.folder), *pip_options])
    total = sum(file.stat().st_size for file in args.folder.glob("*.whl"))
    print(f"{args.folder}: {total / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
