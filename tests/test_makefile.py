"""What make installs fits together, the link's CUDA with torch's build, and the tests that it names are there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.alone import ALONE, TOGETHER
from tests.longest import LONGEST

ROOT = Path(__file__).parents[1]


def planned(home: Path, target: str, cuda: str | None, *words: str) -> str:
    """What would be installed of kvferry for a target, beside a torch of that build."""
    torch = home / "site" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text("raise RuntimeError('it takes five seconds to import')\n")
    (torch / "version.py").write_text(f"__version__ = '2.13.0'\ncuda: str | None = {cuda!r}\n")
    python = home / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={torch.parent} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    command = ["make", "-n", f"VENV={python.parents[1]}", *words, f"{python.parents[1]}/{target}.done"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (found,) = re.findall(r"'\.\[(.+?)\]'", done.stdout)
    return str(found)


@pytest.mark.parametrize(
    ("cuda", "extra"), [("13.0", "worker-cu13"), ("13.2", "worker-cu13"), ("12.8", "worker"), (None, "worker")]
)
@pytest.mark.parametrize(("target", "more"), [("worker", ""), ("test", ",test"), ("bench", ",bench")])
def test_the_links_cuda_is_torchs(tmp_path: Path, target: str, more: str, cuda: str | None, extra: str) -> None:
    """PyPI's torch is built for CUDA 13, and no UCX of CUDA 12 can be installed beside it."""
    assert planned(tmp_path, target, cuda) == extra + more


def test_one_that_is_named_is_taken(tmp_path: Path) -> None:
    assert planned(tmp_path, "worker", "13.0", "EXTRA=worker") == "worker"


@pytest.mark.parametrize(("compilers", "required"), [(("c++",), "1"), ((), "0")])
def test_tests_are_not_skipped_because_a_kernel_does_not_compile(
    tmp_path: Path, compilers: tuple[str, ...], required: str
) -> None:
    """Most tests of kernels skip themselves where the extension is absent."""
    for name in compilers:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    for name in ("make", "sh", "sed"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    command = ["make", "-n", f"VENV={tmp_path / 'venv'}", "EXTRA=worker", str(tmp_path / "venv" / "test.done")]
    done = subprocess.run(
        command, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=True
    )
    assert f"KVFERRY_KERNELS_REQUIRED={required} " in done.stdout


def benched(home: Path, imports: str) -> list[str]:
    """Commands that measuring a GPU would run with a Python that can import so much."""
    for name in ("own", "venv/bin/python"):
        python = home / name
        python.parent.mkdir(parents=True, exist_ok=True)
        asks = f"case \"$2\" in *'{imports}'*) exit 0;; *import*) exit 1;; esac"
        python.write_text(f"#!/bin/sh\n{asks}\necho {name} $@\n")
        python.chmod(0o755)
    command = ["make", "--no-print-directory", f"PYTHON={home / 'own'}", f"VENV={home / 'venv'}", "bench-gpu"]
    command += ["MAKE=echo made", "ARGS=--tiny"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


def test_a_gpu_is_measured_by_the_python_that_has_torch(tmp_path: Path) -> None:
    """Such machines often have no network, and their torch is the one to measure."""
    assert benched(tmp_path, "import torch, triton") == ["own -m benchmarks.gpu --tiny"]
    made, run = benched(tmp_path, "nothing of that")
    assert made.startswith("made")
    assert made.endswith("venv/test.done")
    assert run == "venv/bin/python -m benchmarks.gpu --tiny"


def test_tests_that_are_named_are_there(tmp_path: Path) -> None:
    """pytest runs none at all where it misses one."""
    targets = re.findall(r"^((?:test|fuzz)[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"test", "test-avx512", "test-arm", "fuzz-api"} <= {*targets}
    command = ["make", "-n", "EXTRA=worker", f"VENV={tmp_path}", *targets]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    named = {*re.findall(r"\btests/[\w./-]+", done.stdout)}
    assert "tests/kernels/test_cpu.py" in named
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_files_that_begin_first_or_run_alone_are_there() -> None:
    assert {path.name for path in (ROOT / "tests").rglob("test_*.py")} >= LONGEST | ALONE | TOGETHER


PARTS = {"without clusters": "--ignore", "three at a time": "not alone", "alone": "and alone", "beside": "--timeout"}


@pytest.mark.parametrize("broken", [None, "linters", *PARTS])
def test_each_part_runs_once_and_any_that_fails_fails_the_whole(tmp_path: Path, broken: str | None) -> None:
    python = tmp_path / "python"
    failing = PARTS.get(broken or "", "nothing at all")
    python.write_text(f'#!/bin/sh\necho "run: $*"\ncase "$*" in *\'{failing}\'*) exit 1;; esac\n')
    python.chmod(0o755)
    command = ["tests/all.sh", str(python), str(tmp_path), "false" if broken == "linters" else "true"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == bool(broken), done.stdout + done.stderr
    runs = [line for line in done.stdout.splitlines() if line.startswith("run:")]
    assert len(runs) == len(PARTS)
    for words in PARTS.values():
        assert sum(words in run for run in runs) == 1
    (first,), (beside,) = ([run for run in runs if PARTS[part] in run] for part in ("without clusters", "beside"))
    left_out = re.findall(r"--ignore=(\S+)", first)
    elsewhere = [run for run in runs if "alone" in run]
    assert all(name in beside or all(name in run for run in elsewhere) for name in left_out)
