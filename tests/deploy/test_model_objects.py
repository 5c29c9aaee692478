"""The Job's model out of object storage: whole, compared, and gone on with where it was broken off."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.fake_store import FakeStore
from tests.deploy.test_model_job import run

pytest.importorskip("obstore", reason="the extra `objects`, which the router's image has")

WEIGHTS = os.urandom(24_000_000)
FILES = {
    "chat/config.json": b'{"a": 1}',
    "chat/model.safetensors": WEIGHTS,
    "chat/deep/tokenizer.json": b"{}",
    "chat/pytorch_model.bin": b"unwanted",
    "other/config.json": b"another's",
}
PATTERNS = "*.json *.safetensors"


@pytest.fixture
def store() -> Iterator[FakeStore]:
    made = FakeStore(dict(FILES))
    yield made
    made.close()


def variables(store: FakeStore, home: Path) -> dict[str, str]:
    said = {"MODEL_DIR": str(home / "chat"), "MODEL_REPOSITORY": "s3://models/chat", "MODEL_FILES": PATTERNS}
    return {**os.environ, **said, **store.environment()}


def test_a_model_comes_with_what_matches_and_once(store: FakeStore, tmp_path: Path) -> None:
    env = variables(store, tmp_path)
    code, told = run("fetch", env)
    assert code == 0, told
    there = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*.[js]*") if path.is_file()}
    assert {name: there[name] for name in there if not name.endswith(".tag")} == {
        name: data for name, data in FILES.items() if name.startswith("chat") and not name.endswith(".bin")
    }
    assert run("wait", env)[0] == 0
    marker = json.loads((tmp_path / "chat" / ".kvferry-complete").read_text())
    assert marker["repository"] == "s3://models/chat"
    sent = store.sent.total()
    assert run("fetch", env)[0] == 0
    assert store.sent.total() == sent


def test_what_came_is_not_fetched_again(store: FakeStore, tmp_path: Path) -> None:
    folder = tmp_path / "chat"
    folder.mkdir()
    (folder / "model.safetensors.part").write_bytes(WEIGHTS[:20_000_000])
    (folder / "model.safetensors.tag").write_text(
        json.dumps([f'"{store.tag("chat/model.safetensors")}"', len(WEIGHTS)])
    )
    code, told = run("fetch", variables(store, tmp_path))
    assert code == 0, told
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert store.sent["chat/model.safetensors"] == 4_000_000


def test_a_store_that_breaks_off_again_and_again_is_got_over(tmp_path: Path) -> None:
    store = FakeStore(dict(FILES), cuts=15)
    try:
        env, tries = variables(store, tmp_path), 1
        while run("fetch", env)[0] != 0:
            tries += 1
            assert tries <= 20, "the Job gives up"
        assert (tmp_path / "chat" / "model.safetensors").read_bytes() == WEIGHTS
    finally:
        store.close()


def test_what_is_another_version_by_now_begins_anew(store: FakeStore, tmp_path: Path) -> None:
    folder = tmp_path / "chat"
    folder.mkdir()
    (folder / "model.safetensors.part").write_bytes(b"of an older one")
    (folder / "model.safetensors.tag").write_text('["\\"older\\"", 24000000]')
    code, told = run("fetch", variables(store, tmp_path))
    assert code == 0, told
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("by", ["md5", "sums"])
def test_a_damaged_file_is_found_and_fetched_again(store: FakeStore, tmp_path: Path, by: str) -> None:
    name = "chat/model.safetensors"
    right = store.tag(name) if by == "md5" else "0" * 32 + "-3"
    store.tags[name] = right
    if by == "sums":
        store.files["chat/SHA256SUMS"] = f"{hashlib.sha256(WEIGHTS).hexdigest()}  ./model.safetensors\n".encode()
    store.files[name] = WEIGHTS[:1000] + b"damaged" + WEIGHTS[1007:]
    env = variables(store, tmp_path)
    code, told = run("fetch", env)
    assert code == 1
    assert "model.safetensors differs from the store" in told
    assert not (tmp_path / "chat" / ".kvferry-complete").exists()
    store.files[name] = WEIGHTS
    code, told = run("fetch", env)
    assert code == 0, told
    assert (tmp_path / "chat" / "model.safetensors").read_bytes() == WEIGHTS


def test_what_has_no_checksum_is_told(store: FakeStore, tmp_path: Path) -> None:
    store.tags["chat/model.safetensors"] = "0" * 32 + "-3"
    code, told = run("fetch", variables(store, tmp_path))
    assert code == 0
    assert "1 files were compared by size alone: put SHA256SUMS beside them" in told


def test_a_wrong_key_or_an_empty_folder_is_told(store: FakeStore, tmp_path: Path) -> None:
    env = variables(store, tmp_path)
    code, told = run("fetch", {**env, "AWS_ACCESS_KEY_ID": "another"})
    assert code != 0
    assert "403" in told
    code, told = run("fetch", {**env, "MODEL_REPOSITORY": "s3://models/none"})
    assert code != 0
    assert "nothing at s3://models/none matches" in told
