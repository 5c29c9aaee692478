"""What several processes of one run of all tests would each compute: the first one keeps it for the others."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

RUN = "KVFERRY_TEST_RUN"
"""Names a folder that lives as long as the run. Without it, each process computes for itself."""


def once_a_run(name: str, compute: Callable[[], Any]) -> Any:
    """What `compute` returned in this run's first process that asked: a value of JSON, so tuples are lists."""
    folder = os.environ.get(RUN)
    if not folder:
        return compute()
    kept = Path(folder) / f"{name}.json"
    if not kept.exists():
        own = kept.with_suffix(f".{os.getpid()}")
        own.write_text(json.dumps(compute()))
        own.replace(kept)
    return json.loads(kept.read_text())
