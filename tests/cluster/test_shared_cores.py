"""Workers of `serve` that compute on the same cores, one at a time, as real processes."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.local_cluster import MODEL, LocalCluster
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LONG_S = 30.0
TOKENS = 3000
"""So long that the stream goes on when the other worker is stopped, also where all of this takes its time."""


def shares(process: psutil.Process) -> bool:
    links = Path(f"/proc/{process.pid}/fd").iterdir()
    return any(os.readlink(link).startswith("/memfd:cores") for link in links)


def test_workers_share_the_cores_and_one_that_is_stopped_with_them_stops_no_stream(cluster: LocalCluster) -> None:
    prefill, decode = (cluster.worker(node) for node in ("prefill-0", "decode-0"))
    if not (shares(prefill) and shares(decode)):
        pytest.skip("this machine has cores for all")
    source = random.Random(77)
    prompt = source.choices(range(1000, 40000), k=3000)
    arrivals: list[float] = []
    enough = threading.Event()

    def stream() -> None:
        with cluster.client.completions.create(
            model=MODEL, prompt=prompt[:40], max_tokens=TOKENS, stream=True, extra_body={"ignore_eos": True}
        ) as pieces:
            for _ in pieces:
                arrivals.append(time.monotonic())
                if enough.is_set():
                    return

    def ask() -> None:
        cluster.client.completions.create(model=MODEL, prompt=prompt, max_tokens=1)

    threads = [threading.Thread(target=stream)]
    threads[0].start()
    wait_for(lambda: len(arrivals) > 20, LONG_S)
    threads.append(threading.Thread(target=ask))
    began = prefill.cpu_times().user
    threads[1].start()
    wait_for(lambda: prefill.cpu_times().user > began + 0.5, LONG_S)
    prefill.send_signal(signal.SIGSTOP)
    try:
        seen = len(arrivals)
        wait_for(lambda: len(arrivals) > seen + 20, LONG_S)
    finally:
        prefill.send_signal(signal.SIGCONT)
        enough.set()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
