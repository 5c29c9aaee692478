"""Processes of a forked cluster are what started ones are: commands, parents, priorities, descriptors of their own."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.local_cluster import LocalCluster, local_cluster
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROLES = {"router": 0, "prefill": 5, "decode": 0}
"""Niceness of each."""


def pipes(process: psutil.Process) -> dict[str, int]:
    """Pipes that the process has open, and one of their descriptors."""
    folder = Path(f"/proc/{process.pid}/fd")
    links = {int(entry.name): os.readlink(entry) for entry in folder.iterdir()}
    return {link: number for number, link in links.items() if link.startswith("pipe:")}


def of_roles(cluster: LocalCluster) -> dict[str, psutil.Process]:
    found = {role: cluster.children(role) for role in ROLES}
    assert {role: len(each) for role, each in found.items()} == dict.fromkeys(ROLES, 1)
    return {role: each for role, (each,) in found.items()}


def test_forked_processes_are_what_started_ones_are() -> None:
    with local_cluster("--kv-blocks", "64", "--threads", "1") as cluster:
        serve, processes = psutil.Process(cluster.process.pid), of_roles(cluster)
        assert "serve" in serve.cmdline()
        assert serve.ppid() == os.getpid()
        for role, process in processes.items():
            assert process.ppid() == serve.pid
            assert process.name() == "kvferry"
            assert process.nice() - serve.nice() == ROLES[role]
            said = os.readlink(f"/proc/{process.pid}/fd/1")
            assert said == os.readlink(f"/proc/{process.pid}/fd/2")
            others = [each for each in processes.values() if each != process]
            assert not any(said in pipes(other) for other in others), "its end would not be heard"
        decode = processes["decode"]
        decode.send_signal(signal.SIGKILL)
        wait_for(lambda: any("decode-0 ended (SIGKILL" in line for line in cluster.log), 30)
        wait_for(lambda: [each.pid for each in cluster.children("decode")] not in ([], [decode.pid]), 60)
    assert not serve.is_running()
    assert not any(process.is_running() for process in processes.values())
