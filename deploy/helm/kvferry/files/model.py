"""Downloads a model to a volume, for the router's image: `fetch` downloads it, `wait` waits until it is complete.

MODEL_DIR                        destination
MODEL_REPOSITORY                 repository of the hub, or s3://, gs:// or az:// with bucket and folder (see
                                 objects.py); without it `wait` waits for a directory that has a config
MODEL_REVISION                   branch, tag or commit of the hub
MODEL_FILES                      patterns of the files, separated by spaces; empty: all
HF_TOKEN, HF_ENDPOINT, AWS_…     as huggingface_hub and the clouds' tools read them

An interrupted download resumes. The marker names the complete revision: every file has its size, and its checksum where
the hub or the store has one."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import objects

MARKER = ".kvferry-complete"
POLL_S, LINE_S = 2.0, 15.0


def main(deed: str) -> int:
    folder, repository = Path(os.environ["MODEL_DIR"]), os.environ.get("MODEL_REPOSITORY", "")
    wanted = {"repository": repository, "revision": os.environ.get("MODEL_REVISION") or "main"}
    patterns = os.environ.get("MODEL_FILES", "").split()
    if deed == "wait":
        return wait(folder, wanted)
    try:
        return fetch(folder, wanted, patterns)
    except Exception as error:
        say(f"cannot download {repository} to {folder}: {type(error).__name__}: {error}")
        return 1  # completed files stay, and the Job tries again


def fetch(folder: Path, wanted: dict[str, str], patterns: list[str]) -> int:
    """Download the wanted files unless the marker says that they are complete; then the hub is not asked."""
    if is_complete(folder, wanted):
        return say(f"{folder} is already complete")
    (folder / MARKER).unlink(missing_ok=True)
    from_store = wanted["repository"].startswith(objects.SCHEMES)
    commit, damaged = (from_objects if from_store else from_hub)(folder, wanted, patterns)
    if damaged:
        return 1
    (folder / f"{MARKER}.new").write_text(json.dumps({**wanted, "commit": commit}))
    os.replace(folder / f"{MARKER}.new", folder / MARKER)
    return say(f"{folder} is complete: {size(folder) / 1e9:.1f} GB")


def from_objects(folder: Path, wanted: dict[str, str], patterns: list[str]) -> tuple[str, int]:
    version, damaged = objects.fetch(wanted["repository"], folder, patterns, say)
    return str(version), int(damaged)


def from_hub(folder: Path, wanted: dict[str, str], patterns: list[str]) -> tuple[str, int]:
    """Return the downloaded commit, and how many of its files were damaged and removed."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.hf_api import RepoFolder

    repository, revision = wanted["repository"], wanted["revision"]
    commit = str(HfApi().model_info(repository, revision=revision).sha)
    say(f"{repository} at {commit} into {folder}")
    snapshot_download(repository, revision=commit, local_dir=folder, allow_patterns=patterns or None)
    damaged = 0
    for file in HfApi().list_repo_tree(repository, revision=commit, recursive=True):
        path = folder / file.path
        if isinstance(file, RepoFolder) or not path.is_file():
            continue
        if path.stat().st_size != file.size or (file.lfs and objects.digest(path, "sha256") != file.lfs.sha256):
            damaged += 1
            path.unlink()
            say(f"{path} differs from the hub; removed, to be downloaded again")
    return commit, damaged


def wait(folder: Path, wanted: dict[str, str]) -> int:
    printed = -LINE_S
    while not is_complete(folder, wanted):
        if time.monotonic() - printed >= LINE_S:
            printed = time.monotonic()
            say(f"waiting for {wanted['repository'] or 'a model'} in {folder}: {size(folder) / 1e9:.1f} GB are there")
        time.sleep(POLL_S)
    return say(f"{folder} is complete")


def is_complete(folder: Path, wanted: dict[str, str]) -> bool:
    if not wanted["repository"]:
        return (folder / "config.json").is_file()
    try:
        marker = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError):
        return False
    return {name: marker.get(name) for name in wanted} == wanted


def size(folder: Path) -> int:
    """Return the bytes in the folder, incomplete files included. Files may vanish while they are counted."""
    found = 0
    for path in folder.rglob("*"):
        try:
            found += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return found


def say(text: str) -> int:
    print(text, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
