"""The command line as a user meets it: subcommands, exit statuses, one line per mistake."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest

from kvferry.cli import doctor
from kvferry.cli import main as command
from kvferry.cli.bootstrap import ERROR_PREFIX
from kvferry.cli.check_result import Result
from kvferry.protocol.errors import ConfigError, NoNodes
from kvferry.protocol.settings import RouterSettings, WorkerSettings


@pytest.fixture
def entry(monkeypatch, no_thread_variables):
    """Put an entry point in the place of a process's own; returns what it was called with."""
    calls: list = []

    def place(module: str, function: str, error: Exception | None = None) -> list:
        async def run(settings, *services):
            calls.append((settings, os.environ.get("OMP_NUM_THREADS")))
            if error is not None:
                raise error

        monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**{function: run}))
        return calls

    monkeypatch.setattr(command, "set_up_log", lambda level, form="text": None)
    return place


def test_router_gets_its_settings(entry):
    calls = entry("kvferry.router.main", "serve_router")
    assert command.run(["router", "--port", "0", "--served-model-name", "m"]) == 0
    assert calls == [(RouterSettings(port=0, served_model_name=("m",)), None)]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_workers_get_their_role_and_threads_before_anything_is_imported(entry, role):
    calls = entry("kvferry.worker.serve", "serve_node")
    assert command.run([role, "--threads", "3"]) == 0
    assert calls == [(WorkerSettings(role=role, threads=3), "3")]
    assert command.run([role]) == 0
    assert calls[1][0].threads >= 1


def test_a_config_error_is_one_line_and_status_2(entry, capsys):
    entry("kvferry.router.main", "serve_router", ConfigError("port 1 is taken;\nchoose another --port"))
    assert command.run(["router"]) == 2
    assert capsys.readouterr().err == f"{ERROR_PREFIX}port 1 is taken; choose another --port\n"


def test_another_error_of_ours_is_status_1(entry, capsys):
    entry("kvferry.router.main", "serve_router", NoNodes("nobody"))
    assert command.run(["router"]) == 1
    assert capsys.readouterr().err == f"{ERROR_PREFIX}nobody\n"


@pytest.mark.parametrize("argv", [["router", "--port", "x"], ["router", "--prot", "1"], ["rooter"], ["serve", "now"]])
def test_usage_mistakes_are_one_line_and_status_2(argv, capsys):
    assert command.run(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(ERROR_PREFIX)
    assert "--help" in line


def test_ctrl_c_is_no_traceback(entry):
    entry("kvferry.router.main", "serve_router", KeyboardInterrupt())
    assert command.run(["router"]) == 130


def test_help_shows_flags_variables_and_defaults_but_nothing_hidden(capsys):
    assert command.run(["router", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--max-inflight" in text
    assert "KVFERRY_MAX_INFLIGHT" in text
    assert "default: 1024" in text
    assert "status" not in text
    assert command.run(["serve", "--help"]) == 0
    assert "--node-id" not in capsys.readouterr().out


def test_the_console_script_leaves_at_once_with_its_output_and_status():
    code = (
        "import atexit, kvferry.cli.main as m; atexit.register(print, 'taken apart'); "
        "m.run = lambda: print('last words') or 3; m.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "last words\n", "")


def test_no_arguments_show_help(capsys):
    assert command.run([]) == 2
    assert "Commands:" in capsys.readouterr().err


def test_help_and_version_import_nothing_large():
    code = (
        "import sys, kvferry.cli.main; status = kvferry.cli.main.run(sys.argv[1:]);"
        "large = {'torch', 'transformers', 'ucxx', 'fastapi', 'httpx', 'redis', 'numpy'} & set(sys.modules);"
        "sys.exit(status or ' '.join(large) or 0)"
    )
    for argv in (["--help"], ["router", "--help"], ["version"], ["--version"], ["health", "--help"]):
        done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert "kvferry" in done.stdout


def test_doctor_s_exit_status_says_whether_something_failed(monkeypatch, no_thread_variables, capsys):
    monkeypatch.setattr(command, "set_up_log", lambda level, form="text": None)
    for level, status in (("ok", 0), ("warn", 0), ("fail", 1)):
        monkeypatch.setattr(doctor, "all_checks", lambda settings, checks, level=level: [Result(level, "x", "found")])
        assert command.run(["doctor"]) == status
    assert len(capsys.readouterr().out.splitlines()) == 3
