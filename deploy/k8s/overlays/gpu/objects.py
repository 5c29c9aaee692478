"""Downloads a model from object storage (s3://, gs://, az://) for `model.py`, with obstore.

obstore finds credentials as the clouds' own tools do (environment variables, a workload's identity, the machine's).

An interrupted file resumes while the store still has the same version. Files are compared with SHA256SUMS, where the
folder has that file, or else with the MD5 that stores report for files uploaded in one piece."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

SCHEMES = ("s3://", "gs://", "az://")
SUMS = "SHA256SUMS"
AT_ONCE, CHUNK = 4, 1 << 20
"""Files downloaded at once, and bytes written at once."""
Object = dict[str, Any]


def fetch(url: str, folder: Path, patterns: list[str], say: Callable[[str], int]) -> tuple[str, int]:
    """Download the matching files; return their common version and how many were damaged and removed."""
    import obstore
    from obstore.store import from_url

    store = from_url(url)
    listed = {item["path"]: item for page in obstore.list(store) for item in page}
    wanted = {name: item for name, item in listed.items() if name == SUMS or not patterns or matches(name, patterns)}
    if not wanted.keys() - {SUMS}:
        raise SystemExit(f"nothing at {url} matches {' '.join(patterns) or '*'}")
    if outside := [name for name in wanted if ".." in name.split("/")]:
        raise SystemExit(f"{url} has a file that would lie outside {folder}: {outside[0]}")
    say(f"{len(wanted)} files of {sum(item['size'] for item in wanted.values()) / 1e9:.1f} GB from {url} into {folder}")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda item: download(obstore, store, item, folder), wanted.values()))
    damaged = compare(folder, wanted, say)
    return version(wanted.values()), damaged


def matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def version(items: Iterable[Object]) -> str:
    """Return a version of all files together."""
    rows = sorted([item["path"], item["e_tag"], item["size"]] for item in items)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def download(obstore: Any, store: Any, item: Object, folder: Path) -> None:
    """Download one file. `.part` and `.tag` beside it are the bytes so far and their version."""
    path = folder / item["path"]
    part, tag = path.with_name(path.name + ".part"), path.with_name(path.name + ".tag")
    version_line = json.dumps([item["e_tag"], item["size"]])
    resumes = tag.is_file() and tag.read_text() == version_line
    if resumes and path.is_file() and path.stat().st_size == item["size"]:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if not resumes:
        part.unlink(missing_ok=True)
        tag.write_text(version_line)
    with part.open("ab") as file:
        if file.tell() < item["size"]:
            options = {"range": {"offset": file.tell()}, "if_match": item["e_tag"]}
            for chunk in obstore.get(store, item["path"], options=options).stream(min_chunk_size=CHUNK):
                file.write(chunk)
    os.replace(part, path)


def compare(folder: Path, wanted: dict[str, Object], say: Callable[[str], int]) -> int:
    """Remove files that differ from the store, so that they are downloaded again; return how many."""
    sums = read_sums(folder / SUMS) if SUMS in wanted else {}
    damaged = unchecked = 0
    for name, item in wanted.items():
        path, md5 = folder / name, (item["e_tag"] or "").strip('"').lower()
        if name in sums:
            intact = digest(path, "sha256") == sums[name]
        elif re.fullmatch("[0-9a-f]{32}", md5) and not sums:
            intact = digest(path, "md5") == md5
        else:
            intact, unchecked = True, unchecked + (name != SUMS)
        if not intact or path.stat().st_size != item["size"]:
            damaged += 1
            path.unlink()
            say(f"{path} differs from the store; removed, to be downloaded again")
    if unchecked:
        say(f"{unchecked} files were compared by size alone: put {SUMS} beside them, as sha256sum writes it")
    return damaged


def read_sums(path: Path) -> dict[str, str]:
    """Parse names and SHA-256 from lines of sha256sum."""
    rows = (line.split(maxsplit=1) for line in path.read_text().splitlines() if line.strip())
    return {name.lstrip("*").removeprefix("./"): sha256.lower() for sha256, name in rows}


def digest(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()
