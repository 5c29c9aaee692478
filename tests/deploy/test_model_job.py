"""What the Job and the init containers run: a model comes to a volume whole, and pods wait for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.manifests import K8S, of_kind, pod_specs, render
from tests.model_files.fake_hub import COMMIT, FakeHub
from tests.waiting import wait_for

SCRIPT = K8S / "overlays" / "gpu" / "model.py"
FILES = {"config.json": b'{"a": 1}', "model.safetensors": os.urandom(3_000_000), "pytorch_model.bin": b"unwanted"}


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    made = FakeHub(dict(FILES))
    yield made
    made.close()


def variables(hub: FakeHub, home: Path) -> dict[str, str]:
    """As the gpu overlay says, but for what and where."""
    said = next(
        item["data"] for name, item in of_kind(render("gpu"), "ConfigMap").items() if "MODEL_DIR" in item["data"]
    )
    here = {"MODEL_DIR": str(home / "models" / "model"), "MODEL_REPOSITORY": "org/tiny"}
    return {**os.environ, **said, **here, **hub.environment(home / "tmp")}


def run(deed: str, env: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run([sys.executable, SCRIPT, deed], env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_pods_run_this_script() -> None:
    specs = pod_specs(render("gpu"))
    (job,) = specs["kvferry-model"]["containers"]
    assert job["command"] == ["python", "/run/kvferry/model/model.py", "fetch"]
    for name in ("kvferry-router", "kvferry-prefill", "kvferry-decode"):
        (first,) = specs[name]["initContainers"]
        assert first["command"] == ["python", "/run/kvferry/model/model.py", "wait"]
        assert all(mount.get("readOnly") for mount in first["volumeMounts"])
    script = next(item for name, item in of_kind(render("gpu"), "ConfigMap").items() if "script" in name)
    assert script["data"] == {name: SCRIPT.with_name(name).read_text() for name in ("model.py", "objects.py")}


def test_a_model_comes_once_and_pods_wait_for_it(hub: FakeHub, tmp_path: Path) -> None:
    env = variables(hub, tmp_path)
    folder = Path(env["MODEL_DIR"])
    waiting = subprocess.Popen([sys.executable, SCRIPT, "wait"], env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert waiting.stdout
        assert "waiting for org/tiny" in waiting.stdout.readline()
        code, told = run("fetch", env)
        assert code == 0, told
        wait_for(lambda: waiting.poll() is not None, 20)
        assert waiting.returncode == 0
    finally:
        waiting.kill()
        waiting.wait()
    for name in ("config.json", "model.safetensors"):
        assert (folder / name).read_bytes() == FILES[name]
    assert not (folder / "pytorch_model.bin").exists(), "the patterns leave it out"
    marker = json.loads((folder / ".kvferry-complete").read_text())
    assert marker == {"repository": "org/tiny", "revision": "main", "commit": COMMIT}
    asked = sum(hub.asked.values())
    assert run("fetch", env)[0] == 0
    assert sum(hub.asked.values()) == asked, "what is whole is not asked for"


def test_a_file_that_breaks_off_goes_on_and_is_whole(tmp_path: Path) -> None:
    """The library writes pieces of 10 MB, of which those that came stay."""
    weights = os.urandom(24_000_000)
    hub = FakeHub({"config.json": b"{}", "model.safetensors": weights}, cuts=1)
    try:
        env = variables(hub, tmp_path)
        code, told = run("fetch", env)
        assert code == 0, told
        assert (Path(env["MODEL_DIR"]) / "model.safetensors").read_bytes() == weights
        assert hub.cuts == 0
        assert hub.sent["model.safetensors"] < 1.2 * len(weights), "it began anew"
    finally:
        hub.close()


def test_what_the_hub_did_not_send_is_found_and_fetched_again(hub: FakeHub, tmp_path: Path) -> None:
    """A proxy that damages a file does not change its length."""
    whole = hub.files["model.safetensors"]
    hub.files["model.safetensors"] = whole[:1000] + b"damaged" + whole[1007:]
    env = variables(hub, tmp_path)
    code, told = run("fetch", env)
    assert code == 1
    assert "model.safetensors differs from the hub" in told
    assert not (Path(env["MODEL_DIR"]) / ".kvferry-complete").exists()
    hub.files["model.safetensors"] = whole
    code, told = run("fetch", env)
    assert code == 0, told
    assert (Path(env["MODEL_DIR"]) / "model.safetensors").read_bytes() == whole


def test_another_revision_is_not_taken_for_the_one_that_is_there(hub: FakeHub, tmp_path: Path) -> None:
    env = variables(hub, tmp_path)
    assert run("fetch", env)[0] == 0
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, SCRIPT, "wait"], env={**env, "MODEL_REVISION": "v2"}, timeout=3)
