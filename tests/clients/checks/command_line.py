"""Coding agents of the command line: run headless in a folder of their own, their JSON events read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCRIPTED = os.environ["CHECK_SCRIPTED_URL"]
"""Base URL of the router whose model says what its prompt dictates."""
KEY = os.environ["CHECK_SCRIPTED_KEY"]
HOME = Path(os.environ["CHECK_HOME"])
"""Folder of the agent's installation."""
RUN_S = 50.0
"""Longest time for one run of an agent, in seconds."""
MCP = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]
"""Command of an MCP server with one tool, `shout`."""


def script(*steps: str) -> str:
    """A prompt that dictates these answers, one after each tool result."""
    return f"Do it. SCRIPT[{json.dumps(steps)}]SCRIPT"


def call(name: str, **arguments: Any) -> str:
    """What the demo model says to call a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def folder() -> Path:
    """A new folder to work in; it stays until the checks have ended, for a session that goes on there."""
    return Path(tempfile.mkdtemp(prefix="work-", dir=HOME))


def clear() -> None:
    """Remove earlier folders and what the agent keeps about its user."""
    for old in (*HOME.glob("work-*"), HOME / "home"):
        shutil.rmtree(old, ignore_errors=True)
    (HOME / "home").mkdir()


def run(argv: Sequence[str], where: Path, **env: str) -> list[dict[str, Any]]:
    """Run an agent's command in a folder; return the events that it writes as lines of JSON."""
    shown = output_of(argv, where, **env)
    events = [json.loads(line) for line in shown.splitlines() if line.startswith("{")]
    assert events, shown[-800:]
    return events


def output_of(argv: Sequence[str], where: Path, **env: str) -> str:
    """Run an agent's command in a folder; return what it writes, errors included."""
    programs = f"{HOME / 'node_modules' / '.bin'}:{HOME / 'bin'}"
    bare = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(HOME / "home"), **env}
    done = subprocess.run(
        argv, cwd=where, env=bare, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=RUN_S,
    )  # fmt: skip
    return done.stdout
