from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from kvferry.cli.progress import progress_on
from kvferry.runtime.log import REQUEST, json_line, set_up_log


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_records_are_objects_with_the_id_of_their_request(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_log("info", "json")
    log = logging.getLogger("kvferry.x")
    log.info("plain %d\nof two lines", 7)
    token = REQUEST.set("order-7")
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("failed")
    finally:
        REQUEST.reset(token)
    log.debug("quiet")
    plain, failed = map(json.loads, capsys.readouterr().err.splitlines())
    assert plain.pop("time").endswith("Z")
    assert plain == {"level": "info", "logger": "kvferry.x", "message": "plain 7\nof two lines"}
    assert (failed["level"], failed["request_id"]) == ("error", "order-7")
    assert failed["error"].endswith("ValueError: broken")


def test_a_line_that_is_no_object_becomes_one() -> None:
    assert json.loads(json_line('{"message": "m"}', "decode-0")) == {"message": "m", "process": "decode-0"}
    for text in ("words", "{no json", "[1]"):
        assert json.loads(json_line(text))["message"] == text


def test_what_children_print_is_passed_on_with_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    progress = progress_on(form="json")
    progress.echo('[prefill-0] {"message": "ready", "level": "info"}')
    progress.echo("[router] Segmentation fault")
    progress.update("decode-0", 0.0, False)
    progress.update("decode-0", 1.0, True)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line.get("process"), line["message"].split(" after")[0]) for line in lines] == [
        ("prefill-0", "ready"),
        ("router", "Segmentation fault"),
        (None, "decode-0: ready"),
    ]
