"""The fuzzer of model files finds what it looks for, and remembers nothing that would hide it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.protocol.errors import ConfigError, ModelFailed
from tests import file_fuzz
from tests.file_fuzz import Found, fuzzed
from tests.file_mutants import write_directory
from tests.file_readers import LONGEST, FileReaders, Outcome, Remembered, masks, needs, outcome_of, serve

ROOT = Path(__file__).parents[1]


class PanicException(BaseException):
    """As a library in Rust raises it."""


def python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=600, env=env)


@pytest.mark.slow
def test_what_is_remembered_of_a_mutant_is_what_reading_it_tells(tmp_path: Path) -> None:
    """In a process of its own, since remembering replaces functions of production."""
    code = """
import json, sys
from pathlib import Path
from tests.file_mutants import Mutants
from tests.file_readers import FileReaders
mutants = Mutants(Path(sys.argv[1]))
def all_of(readers):
    found = [readers.outcome(mutants.write(seed)) for seed in range(150)]
    return [[each.wrong, each.said] for each in found], sum(each.again for each in found)
read, none = all_of(FileReaders(remember=False))
readers = FileReaders()
(first, some), (second, all_again) = all_of(readers), all_of(readers)
print(json.dumps([read == first == second, none, some, all_again, sum(bool(said) for _, said in read)]))
"""
    done = python(code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    same, none, some, all_again, refused = json.loads(done.stdout)
    assert same
    assert none == 0 < some < all_again == 150
    assert 30 < refused < 140


@pytest.mark.parametrize(
    ("error", "wrong", "said"),
    [
        (ConfigError("model x is damaged"), "", "model x is damaged"),
        (ModelFailed("no numbers"), "", "no numbers"),
        (ConfigError("it is damaged"), "it does not name the model", "it is damaged"),
        (ConfigError("x\nis damaged"), "no line of plain words", "x\nis damaged"),
        (ConfigError("x is <a object at 0x12>"), "no line of plain words", "x is <a object at 0x12>"),
        (ConfigError("x" * (LONGEST + 1)), "no line of plain words", "x" * (LONGEST + 1)),
        (KeyError("x"), "no typed error", ""),
        (PanicException("x"), "no typed error", ""),
    ],
)
def test_a_mutant_is_refused_in_one_line_by_a_typed_error(error: BaseException, wrong: str, said: str) -> None:
    def read(_: Path) -> None:
        raise error

    found = outcome_of(read, Path("x"))
    assert found.said == said
    assert wrong in found.wrong
    assert bool(found.wrong) == bool(wrong)


@pytest.mark.parametrize(
    ("read", "unread"),
    [
        (needs, ("tokenizer.json", "tokenizer_config.json")),
        (serve, ("tokenizer.json", "tokenizer_config.json")),
        (masks, ("model.safetensors", "tokenizer_config.json")),
        (FileReaders(remember=False).text, ("model.safetensors",)),
    ],
)
def test_a_part_of_the_reading_does_not_see_the_files_that_its_key_lacks(
    tmp_path: Path, read: Callable[[Path], None], unread: tuple[str, ...]
) -> None:
    path = write_directory(tmp_path / "whole")
    for name in unread:
        (path / name).write_bytes(b"not read")
    assert outcome_of(read, path) == Outcome()


def test_errors_are_remembered_and_the_oldest_results_are_forgotten() -> None:
    kept, made = Remembered(2), []

    def make(value: int) -> int:
        made.append(value)
        return 1 // value

    for key in (1, 0, 0, 1, 2, 0):
        if key:
            assert kept.get(key, lambda: make(key)) == 1 // key  # noqa: B023 - called at once
        else:
            with pytest.raises(ZeroDivisionError):
                kept.get(key, lambda: make(key))  # noqa: B023
    assert made == [1, 0, 2, 0]


@pytest.mark.parametrize("busy", ["while True: pass", "signal.pause()"])
def test_a_process_that_hangs_says_where_and_ends(busy: str) -> None:
    code = f"""
import signal
from tests import file_fuzz
file_fuzz.LIMIT_CPU_S, file_fuzz.LIMIT_S = 0.2, 2.0
file_fuzz.bound()
with file_fuzz.timed():
    pass
with file_fuzz.timed():
    {busy}
"""
    done = python(code)
    assert done.returncode == (-signal.SIGPROF if "while" in busy else -signal.SIGALRM)
    assert 'File "<string>", line 9' in done.stderr


def test_a_process_that_took_too_much_memory_is_found() -> None:
    code = """
from tests import file_fuzz
before = file_fuzz.resident()
small = bytearray(1 << 29)
print(file_fuzz.peak() - before > file_fuzz.MEMORY)
large = bytearray(file_fuzz.MEMORY + (1 << 20))
print(file_fuzz.peak() - before > file_fuzz.MEMORY)
"""
    assert python(code).stdout.split() == ["False", "True"]


def test_a_mutant_that_ends_its_process_is_told_and_the_next_ones_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "file_fuzz.py"
    script.write_text("""
import json, os, sys
for seed in range(int(sys.argv[2]), int(sys.argv[3])):
    print(json.dumps({"seed": seed, "done": "x"}), flush=True)
    if seed == 4:
        print("no more", file=sys.stderr, flush=True)
        os._exit(3)
    print(json.dumps({"seed": seed, "done": "x", "wrong": "", "said": "no", "again": False}), flush=True)
""")
    monkeypatch.setattr(file_fuzz, "HERE", tmp_path)
    found = list(fuzzed(tmp_path, 2, 7))
    assert [each.seed for each in found] == [2, 3, 4, 5, 6]
    assert [bool(each.wrong) for each in found] == [False, False, True, False, False]
    assert found[2] == Found(4, "x", "the process ended with 3:\nno more\n")
