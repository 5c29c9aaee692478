"""promtool, run where the monitoring files are."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.deploy.binaries import ROOT, need, promtool_binary

MONITORING = ROOT / "deploy" / "monitoring"


def promtool(*arguments: str | Path) -> str:
    """Its output; it must be content. The test is skipped where there is none."""
    binary = need(promtool_binary(), "promtool")
    done = subprocess.run([binary, *arguments], cwd=MONITORING, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
