"""What a process does before it imports anything large."""

from __future__ import annotations

import logging
import os

import pytest

from cli.door import available_cores, complain, set_threads, set_up_log, worker_threads


@pytest.mark.parametrize(
    ("text", "expected"),
    [("150000 100000", 2), ("50000 100000", 1), ("max 100000", 1000), ("garbage", 1000), ("6400000 100000", 64)],
)
def test_a_container_quota_bounds_the_cores(tmp_path, monkeypatch, text, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(1000)))
    (tmp_path / "cpu.max").write_text(text)
    assert available_cores(tmp_path / "cpu.max") == expected


def test_zero_threads_means_all_cores(tmp_path):
    assert worker_threads(5) == 5
    assert worker_threads(0) == available_cores() >= 1
    assert available_cores(tmp_path / "none") == len(os.sched_getaffinity(0))


def test_thread_variables_are_set(no_thread_variables, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "99")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    set_threads(2)
    assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "2"
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE", "an operator's own choice stays"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    set_threads(2)
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


def test_complaints_are_one_line(capsys):
    complain("two\n  lines")
    assert capsys.readouterr().err == "kvferry: error: two lines\n"


def test_log_lines_name_level_and_source(capsys):
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        set_up_log("warning")
        logging.getLogger("kvferry.node").info("quiet")
        logging.getLogger("kvferry.node").warning("heard")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("WARNING kvferry.node: heard")
