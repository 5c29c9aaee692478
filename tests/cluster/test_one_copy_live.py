"""Workers of `serve` on a CPU have their model's weights once, and one that is restarted maps them again."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvferry.kernels.cpu import instruction_set
from tests.local_cluster import MODEL, LocalCluster, local_cluster
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(instruction_set() is None, reason="installed without the CPU extension"),
]
MIB = 1024
AREA = re.compile(r"^[0-9a-f]+-[0-9a-f]+ (?P<rights>\S+) \S+ \S+ (?P<inode>\d+)(?P<rest>.*?)^VmFlags", re.M | re.S)


@pytest.fixture(scope="module")
def own() -> Iterator[LocalCluster]:
    with local_cluster("--device", "cpu", forked=False) as cluster:
        yield cluster


def weights(process: psutil.Process) -> dict[str, tuple[str, int]]:
    """Of each mapped file of weights: rights and the process's share of it in KiB (PSS)."""
    found = {}
    for area in AREA.finditer(Path(f"/proc/{process.pid}/smaps").read_text()):
        if "/memfd:weights" in area["rest"]:
            share = re.search(r"^Pss: +(\d+) kB", area["rest"], re.M)
            assert share is not None
            found[area["inode"]] = (area["rights"], int(share[1]))
    return found


def text(cluster: LocalCluster) -> str:
    made = cluster.client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=16, temperature=0)
    return made.choices[0].text


def test_both_map_one_copy_and_a_restarted_worker_maps_it_again(own: LocalCluster) -> None:
    before = text(own)
    (prefill,), (decode,) = own.children("prefill"), own.children("decode")
    (inode,) = weights(prefill)
    assert weights(decode).keys() == {inode}
    for process in (prefill, decode):
        rights, share = weights(process)[inode]
        assert rights == "r--s"
        assert share < 60 * MIB, "of 92 MiB that two of them have"
    decode.kill()
    wait_for(lambda: [each.pid for each in own.children("decode")] not in ([], [decode.pid]), 60)

    def maps_again() -> bool:  # a process that was just started has no command line of its own yet
        return any(weights(each).keys() == {inode} for each in own.children("decode"))

    wait_for(maps_again, 60)
    wait_for(lambda: len([lease for lease in own.leases() if lease.role == "decode"]) == 1, 60)
    assert text(own) == before


def test_without_sharing_each_has_its_own() -> None:
    with local_cluster("--device", "cpu", "--no-share-weights", forked=False) as cluster:
        for role in ("prefill", "decode"):
            (process,) = cluster.children(role)
            assert weights(process) == {}
            links = Path(f"/proc/{process.pid}/fd").iterdir()
            assert not any(os.readlink(link).startswith("/memfd:weights") for link in links)
