"""The law of the house: which folder may import which, and what a router process never loads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = {
    "protocol": 0,
    "kernels": 1,
    "model_files": 1,
    "structured_output": 1,
    "runtime": 1,
    "placement": 1,
    "engine": 2,
    "kv_transfer": 2,
    "cluster_state": 2,
    "worker": 3,
    "prefill_worker": 4,
    "encode_worker": 4,
    "decode_worker": 4,
    "speech_worker": 4,
    "engine_adapter": 4,
    "router": 4,
    "elastic_worker": 5,
    "endpoint_picker": 5,
    "simulate": 5,
    "cli": 6,
}
TORCHLESS = [
    "protocol",
    "model_files",
    "structured_output",
    "runtime",
    "placement",
    "cluster_state",
    "router",
    "engine_adapter",
    "endpoint_picker",
    "simulate",
]
WORKERS = ["torch", "transformers", "safetensors", "ucxx", "libucx", "triton", "accelerate", "numpy", "gguf", "PIL"]
OPTIONAL = ("av", "zmq", "grpc", "obstore")
"""Packages of extras that a worker has beside its own only where it needs them."""
"""What a router's environment lacks."""
TRANSFORMERS_DOOR = Path("engine/models/hf.py")


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Dotted names that a module imports, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            assert node.level == 0, f"{path}: relative import"


def tops(path: Path) -> set[str]:
    """Top-level packages that a module imports, kvferry's own by their names inside it."""
    return {name.removeprefix("kvferry.").split(".")[0] for name in imports(path)}


def dotted(path: Path) -> str:
    parts = ("kvferry", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("folder", FLOORS)
def test_a_folder_imports_only_lower_floors(folder):
    assert modules(folder)
    for path in modules(folder):
        for other in (tops(path) & set(FLOORS)) - {folder}:
            assert FLOORS[other] < FLOORS[folder], f"{path.relative_to(ROOT)} imports {other}"
        assert not tops(path) & {"tests", "benchmarks"}


def test_every_package_has_a_floor_and_an_import_name():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"kvferry"}
    assert packages == set(FLOORS)
    links = {path.name: path.readlink() for path in (ROOT / "kvferry").iterdir() if path.is_symlink()}
    assert links == {folder: Path("..") / folder for folder in FLOORS}
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]
    assert config["wheel"]["packages"] == {"kvferry": "kvferry", **{f"kvferry/{name}": name for name in FLOORS}}
    assert set(config["sdist"]["exclude"]) == {f"kvferry/{name}" for name in FLOORS}


def test_imports_name_kvferry():
    """A package of the root that is imported by its folder's name would be a second copy of each of its modules."""
    for path in (path for folder in (*FLOORS, "tests", "benchmarks", "docs", "deploy") for path in modules(folder)):
        bare = {name for name in imports(path) if name.split(".")[0] in FLOORS}
        assert not bare, f"{path.relative_to(ROOT)} imports {bare} without kvferry."


def test_no_module_has_two_names():
    names = [dotted(path) for folder in TORCHLESS for path in modules(folder)]
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        f"bare = sorted(name for name in sys.modules if name.split('.')[0] in {sorted(FLOORS)})\n"
        "sys.exit(f'loaded {bare}' if bare else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def imported_files(path: Path, known: set[str]) -> set[str]:
    """Dotted names of the project's files that a file imports, also late and under TYPE_CHECKING."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & known or {node.module}
    return found & known


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Files that import each other, over whatever others. What nothing left imports is taken away until no such file
    is left, from both ends."""
    left = dict(graph)
    while True:
        targets = set().union(*left.values()) if left else set()
        inner = {name: {to for to in used if to in left} for name, used in left.items()}
        kept = {name: used for name, used in inner.items() if used and name in targets}
        if len(kept) == len(left):
            return sorted(kept)
        left = kept


def test_no_file_imports_what_imports_it():
    paths = {dotted(path): path for folder in FLOORS for path in modules(folder)}
    known = {*paths, "kvferry.kernels.cpu._native", "kvferry.protocol._native"}
    assert circles({name: imported_files(path, known) - {name} for name, path in paths.items()}) == []


def test_a_circle_of_files_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize("folder", TORCHLESS)
def test_no_torch_and_no_transformers_even_late(folder):
    for path in modules(folder):
        assert not tops(path) & set(WORKERS), path


def test_what_a_router_loads_brings_no_torch_through_others():
    names = [dotted(path) for folder in TORCHLESS for path in modules(folder)]
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        f"large = {set(WORKERS)} & set(sys.modules)\n"
        "sys.exit(f'loaded {sorted(large)}' if large else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_nodes_start_without_what_other_extras_install():
    names = [f"kvferry.{role}_worker.service" for role in ("prefill", "decode", "encode", "elastic")]
    code = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({OPTIONAL}))  # importing any of them fails\n"
        "for name in sys.argv[1:]: importlib.import_module(name)"
    )
    names += ["kvferry.worker.serve", "kvferry.cli.main", "kvferry.router.main"]
    done = subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_one_door_to_transformers():
    doors = {path.relative_to(ROOT) for folder in FLOORS for path in modules(folder) if "transformers" in tops(path)}
    assert doors <= {TRANSFORMERS_DOOR}


def test_kernels_package_says_nothing():
    """A process that starts at the root of the repository gives transformers this folder for its `kernels`."""
    tree = ast.parse((ROOT / "kernels/__init__.py").read_text())
    rest = [node for node in tree.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    assert rest == []


def test_the_picture_of_the_house_shows_every_room_on_its_floor():
    picture = (ROOT / "docs/architecture.md").read_text().split("## The rooms")[1].split("```")[1]
    shown: dict[str, int] = {}
    floor = -1
    for line in picture.splitlines():
        if found := re.match(r"\s+subgraph f(\d+) ", line):
            floor = int(found[1])
        elif found := re.match(r"\s+(\w+)\[", line):
            shown[found[1]] = floor
    assert shown == FLOORS
    for lower, upper in re.findall(r"^\s+(\w+) --> (\w+)$", picture, re.MULTILINE):
        assert FLOORS[lower] < FLOORS[upper], f"an arrow from {lower} to {upper}"
        assert any(lower in tops(path) for path in modules(upper)), f"{upper} imports no {lower}"
