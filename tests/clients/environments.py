"""Each client's environment and its checks: installed once, run against a server, reported check by check."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

CHECKS = Path(__file__).with_name("checks")
HOME = Path(sys.prefix) / "clients"
INSTALL_S = 400.0
FROM_NPM = ("node", "command")
"""Kinds of clients whose packages come from npm."""


class Unavailable(Exception):
    """A package cannot be installed here; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Client:
    """One client: what it is installed from, and its files of checks.

    kind      python: files for checks/harness.py; pytest: the client's own suite; node: files for checks/harness.mjs;
              command: a program of npm, run by files for checks/harness.py in the environment of the tests
    packages  of PyPI or npm; the first names the client's version. None: the checks run in this very environment
    seconds   bound on all of its checks together
    """

    name: str
    kind: str
    packages: tuple[str, ...]
    files: tuple[str, ...]
    seconds: float = 600.0


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    ok: bool
    error: str = ""


@dataclass(slots=True)
class Outcome:
    """Of one client: its checks in order, or why there are none."""

    client: str
    version: str = ""
    checks: list[Check] = field(default_factory=list)
    seconds: float = 0.0
    skipped: str = ""

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if not check.ok]


OUTCOMES: list[Outcome] = []
"""Of this session's clients, for the table at its end."""


OPENAI_FILES = (
    "openai_chat.py", "openai_structure.py", "openai_responses.py", "openai_more.py", "openai_media.py",
)  # fmt: skip
CLIENTS = (
    Client("openai", "python", ("openai>=2",), OPENAI_FILES),
    Client("openai node", "node", ("openai@>=6", "zod@>=4"), ("openai_node.mjs", "openai_node_media.mjs")),
    Client(
        "AI SDK", "node", ("@ai-sdk/openai-compatible@>=2", "ai@>=6", "zod@>=4"), ("ai_sdk.mjs", "ai_sdk_media.mjs")
    ),
    Client(
        "LangChain",
        "pytest",
        ("langchain-openai>=1", "langchain-tests>=1"),
        ("langchain_standard.py", "langchain_media.py"),
    ),
    Client("LiteLLM", "python", ("litellm>=1.80", "mcp"), ("litellm_checks.py",)),
    Client("pydantic-ai", "python", ("pydantic-ai-slim[openai]>=1",), ("pydantic_ai_checks.py",)),
    Client("instructor", "python", ("instructor>=1.10",), ("instructor_checks.py",)),
    Client("openai-agents", "python", ("openai-agents>=0.6",), ("openai_agents_checks.py",)),
    Client("anthropic", "python", ("anthropic>=0.70",), ("anthropic_checks.py", "anthropic_media.py")),
    Client("LangGraph", "python", ("langgraph>=1", "langchain-openai>=1"), ("langgraph_checks.py",)),
    Client("smolagents", "python", ("smolagents[openai]>=1.20",), ("smolagents_checks.py",)),
    Client("aider", "python", ("aider-chat>=0.80",), ("aider_checks.py",)),
    Client("Codex", "command", ("@openai/codex@>=0.100",), ("codex_checks.py",)),
    Client("Claude Code", "command", ("@anthropic-ai/claude-code@>=2",), ("claude_code_checks.py",)),
    Client("lm-eval", "python", ("lm-eval[api]>=0.4.9",), ("lm_eval_checks.py",)),
    Client("aiperf", "python", ("aiperf>=0.13",), ("aiperf_checks.py",)),
)
HERE = Client("openai", "python", (), OPENAI_FILES)
"""The official client in the environment of the tests."""


def install(client: Client) -> Path:
    """The client's environment, made unless it is there already. Raises Unavailable."""
    where = HOME / client.name.replace(" ", "-")
    wanted = json.dumps(client.packages)
    stamp = where / "installed.json"
    if stamp.is_file() and stamp.read_text() == wanted:
        return where
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir(parents=True)
    (_install_node if client.kind in FROM_NPM else _install_python)(client, where)
    stamp.write_text(wanted)
    return where


def run(client: Client, url: str, model: str, more: Mapping[str, str] | None = None) -> Outcome:
    """All checks of a client against the server at `url`. `more`: further variables for its checks."""
    try:
        where = install(client) if client.packages else Path(sys.prefix)
    except Unavailable as error:
        return Outcome(client.name, skipped=str(error))
    env = {name: text for name, text in os.environ.items() if not name.startswith(("KVFERRY_", "OPENAI_", "PYTHON"))}
    env |= {"CHECK_URL": url, "CHECK_MODEL": model, "CHECK_HOME": str(where), **(more or {})}
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    began = time.monotonic()
    runner = {"python": _run_python, "node": _run_node, "pytest": _run_pytest, "command": _run_command}[client.kind]
    checks = runner(client, where, env)
    return Outcome(client.name, _version(client, where), checks, time.monotonic() - began)


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: clients and how many of their checks passed."""
    lines = ["| client | version | checks passed | seconds |", "| --- | --- | --- | --- |"]
    for outcome in outcomes:
        passed = len(outcome.checks) - len(outcome.failed)
        told = outcome.skipped and f"skipped: {outcome.skipped}"
        shown = told or f"{passed} of {len(outcome.checks)}"
        lines.append(f"| {outcome.client} | {outcome.version} | {shown} | {outcome.seconds:.0f} |")
    return "\n".join(lines)


def _install_python(client: Client, where: Path) -> None:
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        raise Unavailable("uv is not installed")
    _call(client, [uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(where)])
    python = str(where / "bin" / "python")
    _call(client, [uv, "pip", "install", "--quiet", "--python", python, *client.packages])


def _install_node(client: Client, where: Path) -> None:
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        raise Unavailable("node and npm are not installed")
    (where / "package.json").write_text('{"private": true, "type": "module"}')
    _call(client, [npm, "install", "--no-audit", "--no-fund", "--loglevel=error", *client.packages], where)


def _call(client: Client, command: Sequence[str], cwd: Path | None = None) -> None:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"installing {client.packages[0]} took more than {INSTALL_S:.0f} s") from None
    if done.returncode:
        reason = next((line.strip() for line in reversed(done.stderr.splitlines()) if line.strip()), "no reason given")
        raise Unavailable(f"{' '.join(client.packages)} cannot be installed: {reason}")


def _run_python(client: Client, where: Path, env: Mapping[str, str]) -> list[Check]:
    files = [str(CHECKS / name) for name in client.files]
    return _results(_output([str(where / "bin" / "python"), str(CHECKS / "harness.py"), *files], client, where, env))


def _run_command(client: Client, where: Path, env: Mapping[str, str]) -> list[Check]:
    files = [str(CHECKS / name) for name in client.files]
    command = [sys.executable, str(CHECKS / "harness.py"), *files]
    return _results(_output(command, client, where, env))


def _run_node(client: Client, where: Path, env: Mapping[str, str]) -> list[Check]:
    """Node looks for packages beside the file that imports them: the checks are copied there."""
    for name in ("harness.mjs", *client.files):
        shutil.copy(CHECKS / name, where / name)
    return _results(_output(["node", "harness.mjs", *client.files], client, where, env))


def _run_pytest(client: Client, where: Path, env: Mapping[str, str]) -> list[Check]:
    report, config = where / "report.xml", where / "pytest.ini"
    report.unlink(missing_ok=True)
    config.write_text("[pytest]\nasyncio_mode = auto\nasyncio_default_test_loop_scope = session\n")
    files = [str(CHECKS / name) for name in client.files]
    apart = ["-p", "no:cacheprovider", "-c", str(config), f"--confcutdir={CHECKS}"]
    argv = ["-m", "pytest", "-q", *apart, f"--junitxml={report}", *files]
    shown = _output([str(where / "bin" / "python"), *argv], client, where, env)
    if not report.is_file():
        return _results(shown)
    # Written by the client that ran here.
    return [check for case in xml.parse(report).getroot().iter("testcase") if (check := _from_junit(case)) is not None]  # noqa: S314


def _from_junit(case: xml.Element) -> Check | None:
    """None for a test that the suite itself left out: it was skipped, or is expected to fail."""
    if case.find("skipped") is not None:
        return None
    wrong = [part.get("message", "") for part in case if part.tag in ("failure", "error")]
    name = f"{str(case.get('classname')).rpartition('.')[2]}.{case.get('name')}"
    return Check(name, not wrong, "; ".join(wrong)[:1000])


def _output(command: Sequence[str], client: Client, where: Path, env: Mapping[str, str]) -> str:
    """What the command writes, at most within the client's seconds: then it and what it started are killed. A line for
    a check that failed follows when it did not end well."""
    process = subprocess.Popen(
        command, cwd=where, env=dict(env), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        shown = process.communicate(timeout=client.seconds)[0]
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0] + _failure("all checks end", f"not within {client.seconds:.0f} s")
    return shown if process.returncode == 0 else shown + _failure("the checks run", shown[-1500:])


def _failure(name: str, error: str) -> str:
    return "\n" + json.dumps({"name": name, "ok": False, "error": error})


def _results(output: str) -> list[Check]:
    """From the lines that are results; what clients print or log besides is left aside."""
    checks = []
    for line in output.splitlines():
        with suppress(ValueError, TypeError, KeyError):
            told = json.loads(line)
            checks.append(Check(told["name"], told["ok"], told["error"]))
    return checks


def _version(client: Client, where: Path) -> str:
    """Of the client's first package; of this environment's, for checks that run here."""
    if client.kind in FROM_NPM:
        name = client.packages[0].rpartition("@")[0]
        with suppress(OSError):
            return str(json.loads((where / "node_modules" / name / "package.json").read_text())["version"])
        return ""
    name = client.packages[0].split("[")[0].split(">")[0] if client.packages else client.name
    command = [str(where / "bin" / "python"), "-c", f"import importlib.metadata as m; print(m.version({name!r}))"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()
