"""What a process does before it imports anything large."""

from __future__ import annotations

import logging
import os

from kvferry.cli.bootstrap import print_error, set_encoding, set_threads, worker_threads
from kvferry.runtime.limits import available_cores
from kvferry.runtime.log import set_up_log


def test_zero_threads_means_all_cores():
    assert worker_threads(5) == 5
    assert worker_threads(0) == available_cores() >= 1


def test_ranks_divide_the_cores():
    assert worker_threads(5, 2) == 5, "it is what each has"
    assert worker_threads(0, available_cores()) == 1
    assert worker_threads(0, 1000) == 1


def test_thread_variables_are_set(no_thread_variables, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "99")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    set_threads(2)
    assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "2"
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE", "an operator's own choice stays"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    set_threads(2)
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


def test_texts_are_encoded_where_they_are_unless_an_operator_says_otherwise(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    set_encoding()
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    set_encoding()
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


def test_complaints_are_one_line(capsys):
    print_error("two\n  lines")
    assert capsys.readouterr().err == "kvferry: error: two lines\n"


def test_log_lines_name_level_and_source(capsys):
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        set_up_log("warning")
        logging.getLogger("kvferry.worker").info("quiet")
        logging.getLogger("kvferry.worker").warning("heard")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("WARNING kvferry.worker: heard")
