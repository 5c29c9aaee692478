"""The audit of what images install: it fails where vulnerabilities are known, and where nobody could say."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import audit
from tests.deploy.binaries import ROOT
from tests.deploy.test_locked import LOCKED, SETS, locked, version

BAD = {"id": "PYSEC-1", "fix_versions": ["9.1"], "aliases": []}
PROGRAM = """
import json, pathlib, sys
answers = json.loads(pathlib.Path(sys.argv[1]).read_text())
asked = next(word[2:] for word in sys.argv if word.startswith("-r"))
entries = []
names = []
for line in pathlib.Path(asked).read_text().split():
    name, version = line.split("==")
    names.append(name)
    told = answers.get(name, answers.get("*"))
    found = {"skip_reason": "unknown"} if told is None else {"version": version, "vulns": told}
    entries.append({"name": name, **found})
assert len(set(names)) == len(names), "Double requirement given"
print(json.dumps({"dependencies": entries, "fixes": []}))
"""
"""A pip-audit that answers from a file, and refuses two versions of one package as the real one does."""


def audited(tmp_path: Path, answers: dict[str, Any], locks: dict[str, str]) -> int:
    (tmp_path / "answers").write_text(json.dumps(answers))
    for name, text in locks.items():
        (tmp_path / f"{name}.txt").write_text(text)
    return audit.main([], tmp_path, [sys.executable, "-c", PROGRAM, str(tmp_path / "answers")])


TWO = {"router": "a==1.0 \\\n    --hash=sha256:00\n# b==7\n", "worker": "a==2.0\nB==3.0+cpu ; x == 'y'\n"}


def test_packages_without_vulnerabilities_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audited(tmp_path, {"django": [BAD], "*": []}, TWO) == 0
    assert capsys.readouterr().out == "3 packages looked up, 0 with known vulnerabilities\n"


def test_a_vulnerability_fails_and_says_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audited(tmp_path, {"django": [BAD], "b": [BAD], "*": []}, TWO) == audit.FOUND
    assert "b==3.0 (worker): PYSEC-1, fixed in 9.1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ({}, "knows nothing of django==3.2.0"),
        ({"*": []}, "knows nothing of django==3.2.0"),
        ({"django": [BAD], "a": []}, "not looked up: b==3.0 (unknown)"),
    ],
    ids=["all skipped", "a mirror", "one skipped"],
)
def test_a_service_that_does_not_answer_is_no_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], answers: dict[str, Any], told: str
) -> None:
    assert audited(tmp_path, answers, TWO) == audit.UNANSWERED
    said = capsys.readouterr()
    assert told in said.err
    assert said.err.startswith("NOT AUDITED: ")
    assert not said.out


def test_a_pip_audit_that_fails_is_no_pass(capsys: pytest.CaptureFixture[str]) -> None:
    program = [sys.executable, "-c", "raise SystemExit('no route to host')"]
    assert audit.main([], LOCKED, program) == audit.UNANSWERED
    assert "pip-audit ended with status 1: no route to host" in capsys.readouterr().err


def test_all_that_images_install_is_looked_up() -> None:
    found = audit.pins()
    for name in (*SETS, "torch-cpu", "demo"):
        for item in locked(name).values():
            assert name in found[item.name.lower(), version(item).partition("+")[0]]


def test_it_runs_every_day_and_when_a_lock_changes() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "audit.yml").read_text())
    (when,) = workflow[True]["schedule"]
    assert re.fullmatch(r"\d+ \d+ \* \* \*", when["cron"])
    assert "deploy/docker/locked/**" in workflow[True]["pull_request"]["paths"]
    assert "make audit" in [step.get("run") for step in workflow["jobs"]["audit"]["steps"]]
