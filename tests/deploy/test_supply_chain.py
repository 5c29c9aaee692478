"""Where what is shipped comes from, and how that can be checked: pins, lists of parts, provenance."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.binaries import ROOT
from tests.deploy.test_locked import LOCKED
from tests.deploy.test_release import VERSION

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ATTEST = "actions/attest-build-provenance"


def jobs(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())["jobs"])


def attested(job: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The place of a job's step that signs a provenance, and what it signs."""
    found = [(place, step["with"]) for place, step in enumerate(job["steps"]) if ATTEST in step.get("uses", "")]
    (only,) = found
    return only


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_of_every_workflow_are_pinned_by_commit_and_named(path: Path) -> None:
    used = [line for line in path.read_text().splitlines() if "uses:" in line]
    assert used
    for line in used:
        assert re.search(r"uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), line


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_no_workflow_starts_with_permissions(path: Path) -> None:
    assert yaml.safe_load(path.read_text())["permissions"] == {}


def test_every_line_of_the_locks_is_a_version_or_a_hash() -> None:
    for path in LOCKED.glob("*.txt"):
        text = path.read_text().replace("\\\n", " ")
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        assert lines
        for line in lines:
            assert re.fullmatch(r"[\w.-]+==[\w.+]+( ; [^#]*?)?( +--hash=sha256:[0-9a-f]{64})+", line.strip()), line[:99]


def test_a_release_of_images_is_pinned_and_signed_after_it_was_tried() -> None:
    job = jobs("release.yml")["images"]
    names = [step.get("name") for step in job["steps"]]
    pin = job["steps"][names.index("Pin the base image and Debian's packages")]["run"]
    assert "BASE=$BASE@$digest" in pin
    snapshot = re.search(r'"DEBIAN_SNAPSHOT=\$\((date [^)]*)\)"', pin)
    assert snapshot
    day = subprocess.check_output(["bash", "-c", snapshot[1]], text=True).strip()
    assert re.fullmatch(r"20\d{6}T000000Z", day)
    place, signed = attested(job)
    assert names.index("Build and push") < names.index("Run what was pushed") < place
    assert signed["push-to-registry"] is True
    assert {signed["subject-name"], signed["subject-digest"]} == {
        "${{ steps.pushed.outputs.name }}",
        "${{ steps.pushed.outputs.digest }}",
    }


def test_what_a_release_uploads_is_what_was_signed() -> None:
    job = jobs("release.yml")["wheels"]
    place, signed = attested(job)
    runs = [step.get("run", "") for step in job["steps"]]
    assert runs.index("make sbom") < place < next(i for i, run in enumerate(runs) if "gh release upload" in run)
    assert signed["subject-path"] == job["steps"][-1]["env"]["FILES"] == "${{ matrix.files }}"


@pytest.mark.images
@pytest.mark.timeout(600)
def test_the_list_of_parts_is_what_is_locked(tmp_path: Path) -> None:
    done = subprocess.run(["make", f"VENV={tmp_path}/venv", "sbom"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = json.loads((ROOT / "dist" / f"kvferry-{VERSION}.cdx.json").read_text())
    assert made["bomFormat"] == "CycloneDX"
    assert made["metadata"]["component"]["name"] == "kvferry"
    text = (LOCKED / "worker.txt").read_text() + (LOCKED / "torch-cpu.txt").read_text()
    locked = set(re.findall(r"(?m)^([\w.-]+)==([^\s;]+)", text))
    assert {(part["name"], part["version"]) for part in made["components"]} == locked
    assert all(part["externalReferences"][0]["hashes"] for part in made["components"])
