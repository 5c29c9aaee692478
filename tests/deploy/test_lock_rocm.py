"""`make lock ROCM_INDEX_URL=...`: the set of torch for ROCm, from what uv finds in an index."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.binaries import ROOT
from tests.deploy.test_locked import locked, version

INDEX = "https://index.example/whl/rocm9.9"
HASH = "    --hash=sha256:" + "ab" * 32


def lock(folder: Path, found: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the script in a copy of what it reads, with a uv that finds these packages."""
    target = folder / "deploy" / "docker"
    (target / "locked").mkdir(parents=True)
    shutil.copy(ROOT / "deploy" / "docker" / "lock", target)
    shutil.copy(ROOT / "deploy" / "docker" / "locked" / "torch-cpu.txt", target / "locked")
    (folder / "found").write_text("".join(f"{each} \\\n{HASH} \\\n{HASH}\n" for each in found))
    uv = folder / "uv"
    uv.write_text(
        f'#!/bin/bash\necho "$@" > {folder}/asked\ncat > {folder}/wanted\n'
        f'while [ "$1" != -o ]; do shift; done\ncp {folder}/found "$2"\n'
    )
    uv.chmod(0o755)
    env = {**os.environ, "UV": str(uv), "ROCM_INDEX_URL": INDEX}
    return subprocess.run([target / "lock"], env=env, capture_output=True, text=True)


@pytest.mark.parametrize("triton", ["triton-rocm==3.7.1", "pytorch-triton-rocm==3.5.0"])
def test_torch_and_its_triton_are_written_and_nothing_else(triton: str, tmp_path: Path) -> None:
    torch = f"torch=={version(locked('torch-cpu')['torch']).partition('+')[0]}"
    done = lock(tmp_path, ["filelock==3.30.0", "sympy==1.14.0", f"{torch}+rocm9.9", triton])
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "deploy" / "docker" / "locked"
    assert {path.name for path in folder.iterdir()} == {"torch-cpu.txt", "torch-rocm.txt"}
    comment, *lines = (folder / "torch-rocm.txt").read_text().splitlines()
    assert INDEX in comment
    assert [line for line in lines if "--hash" not in line] == [f"{torch}+rocm9.9 \\", f"{triton} \\"]
    assert sum("--hash=sha256:" in line for line in lines) == 4
    assert (tmp_path / "wanted").read_text().strip() == torch, "the version of the other images"
    asked = (tmp_path / "asked").read_text()
    assert f"--index {INDEX} " in asked
    assert "--generate-hashes" in asked


@pytest.mark.parametrize("found", [["torch==2.13.0", "triton==3.7.1"], ["torch==2.13.0+rocm9.9"], ["sympy==1.14.0"]])
def test_an_index_without_such_a_torch_fails_and_writes_nothing(found: list[str], tmp_path: Path) -> None:
    done = lock(tmp_path, found)
    assert done.returncode != 0
    assert f"{INDEX} has no ROCm build of this torch" in done.stderr
    assert not (tmp_path / "deploy" / "docker" / "locked" / "torch-rocm.txt").exists()
