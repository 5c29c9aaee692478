"""The release: what is built for which tag, and what its workflow may do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.deploy.binaries import ROOT
from tests.deploy.docker_plugins import plugin, run

WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
BAKE = "deploy/docker/bake.json"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.fixture(scope="module")
def workflow() -> dict[Any, Any]:
    return dict(yaml.safe_load(WORKFLOW.read_text()))


def steps(workflow: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    return (step for job in workflow["jobs"].values() for step in job["steps"])


def baked(*argv: str, **variables: str) -> dict[str, Any]:
    """What docker buildx would build, by target."""
    done = run(plugin("docker-buildx"), "bake", "-f", BAKE, "--print", *argv, env=variables)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout)["target"])


def test_a_release_is_four_images_each_with_provenance_and_parts() -> None:
    images = baked("release", VERSION="7.1", REGISTRY="ghcr.io/me/", BASE="python@sha256:12")
    names = ("router:7.1", "worker:7.1", "worker:7.1-cuda", "worker:7.1-speech")
    tags = [f"ghcr.io/me/kvferry/{name}" for name in names]
    assert [tag for image in images.values() for tag in image["tags"]] == tags
    for name, image in images.items():
        assert image["platforms"] == ["linux/amd64", "linux/arm64"][: 1 if name == "worker-cuda" else 2]
        assert image["attest"] == ["type=sbom", "type=provenance,mode=max"]
        assert (image["args"]["VERSION"], image["args"]["BASE"]) == ("7.1", "python@sha256:12")
        assert (ROOT / image["dockerfile"]).exists()


def test_build_arguments_exist() -> None:
    for image in baked("release", VERSION="7.1").values():
        text = (ROOT / image["dockerfile"]).read_text()
        for name in set(image["args"]) - {"SOURCE_DATE_EPOCH"}:  # the builder's own
            assert re.search(rf"^ARG {name}=", text, re.MULTILINE), f"{image['dockerfile']} has no {name}"


def test_make_images_builds_them(tmp_path: Any) -> None:
    """The command line of the Makefile, which is also the workflow's, through buildx itself."""
    (tmp_path / "cli-plugins").mkdir()
    (tmp_path / "cli-plugins" / "docker-buildx").symlink_to(plugin("docker-buildx"))
    (tmp_path / "docker").write_text(f'#!/bin/sh\nshift\nexec {plugin("docker-buildx")} "$@"\n')
    (tmp_path / "docker").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    for more, output in (([], "type=docker"), (["PUSH=1", "REGISTRY=r/"], "type=registry,rewrite-timestamp=true")):
        command = ["make", "-s", "images", "ARGS=--print", *more]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        image = json.loads(done.stdout)["target"]["router"]
        assert image["output"] == [output]
        assert image["tags"] == [f"{'r/' if more else ''}kvferry/router:{VERSION}"]
        assert image["args"]["VERSION"] == VERSION
        assert int(image["args"]["SOURCE_DATE_EPOCH"]) > 1.7e9


def test_the_tag_must_name_the_version() -> None:
    for tag, status in ((f"v{VERSION}", 0), (VERSION, 1), ("v0.0", 1)):
        done = subprocess.run([ROOT / "deploy" / "release-version", tag], capture_output=True, text=True)
        assert done.returncode == status, done.stderr
    done = subprocess.run([ROOT / "deploy" / "release-version", f"v{VERSION}"], capture_output=True, text=True)
    found = dict(line.split("=") for line in done.stdout.splitlines())
    assert found["version"] == VERSION
    assert re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}", found["chart"])


def test_it_runs_on_tags_alone(workflow: dict[Any, Any]) -> None:
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML takes `on` for a truth


def test_a_job_may_do_what_it_needs_and_no_more(workflow: dict[Any, Any]) -> None:
    assert workflow["permissions"] == {}
    pushing = {"contents": "read", "packages": "write"}
    signing = {"id-token": "write", "attestations": "write"}
    assert {name: job["permissions"] for name, job in workflow["jobs"].items()} == {
        "version": {"contents": "read"},
        "images": {**pushing, **signing},
        "wheels": {"contents": "write", **signing},
        "chart": pushing,
    }
    assert all(job["timeout-minutes"] <= 180 for job in workflow["jobs"].values())


def test_wheels_of_both_processors_are_installed_and_asked_before_they_are_published(workflow: dict[Any, Any]) -> None:
    job = workflow["jobs"]["wheels"]
    assert [each["runner"] for each in job["strategy"]["matrix"]["include"]] == ["ubuntu-24.04", "ubuntu-24.04-arm"]
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands[:2] == ["make wheel", "make sbom"]
    assert "gh release upload" in commands[2]


def test_actions_are_pinned_by_commit(workflow: dict[Any, Any]) -> None:
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert len(used) >= 5
    for action in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
    for line in WORKFLOW.read_text().splitlines():
        assert "uses:" not in line or re.search(r"# v\d+\.\d+\.\d+$", line), line


def test_no_expression_is_pasted_into_a_script(workflow: dict[Any, Any]) -> None:
    """A tag's name is what somebody chose: it reaches scripts as a variable."""
    for step in steps(workflow):
        assert "${{" not in step.get("run", "")
        assert step.get("with", {}).get("persist-credentials", False) is False


def test_scripts_parse_and_what_they_run_exists(workflow: dict[Any, Any]) -> None:
    scripts = [step["run"] for step in steps(workflow) if "run" in step]
    for script in scripts:
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    text = "\n".join(scripts)
    assert 'make images PUSH=1 IMAGES="$IMAGE"' in text
    assert re.findall(r"deploy/[\w/-]+", text) == ["deploy/release-version", "deploy/helm/kvferry"]


def test_every_image_of_a_release_is_built(workflow: dict[Any, Any]) -> None:
    group = json.loads((ROOT / BAKE).read_text())["group"]["release"]["targets"]
    assert workflow["jobs"]["images"]["strategy"]["matrix"] == {"image": group}


def test_the_chart_follows_the_images(workflow: dict[Any, Any]) -> None:
    assert workflow["jobs"]["images"]["needs"] == "version"
    assert workflow["jobs"]["chart"]["needs"] == ["version", "images"]
