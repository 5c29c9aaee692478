"""`kvferry batch`: rows answered, resumed, refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.main import run
from kvferry.protocol.errors import NoNodes
from tests.api_parts import Api, FakeCluster, says, served


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster(says("Yes."))


@pytest.fixture
def url(cluster: FakeCluster) -> Iterator[str]:
    with served(Api(cluster).app) as found:
        yield found


def write(path: Path, *bodies: dict[str, Any]) -> Path:
    rows = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for i, body in enumerate(bodies)
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def ask(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def read(path: Path) -> dict[str, Any]:
    return {row["custom_id"]: row for row in map(json.loads, path.read_text().splitlines())}


def test_what_ends_a_line_in_an_answer_ends_no_row(tmp_path: Path, url: str, cluster: FakeCluster) -> None:
    cluster.script = says("One.\u2028Two.\x85")
    source, target = write(tmp_path / "in", ask("a")), tmp_path / "out"
    command = ["batch", str(source), str(target), "--url", url]
    assert run(command) == 0
    written = target.read_text()
    assert run(command) == 0
    assert (len(cluster.dispatches), target.read_text()) == (1, written)


def test_rows_are_answered_once(tmp_path: Path, url: str, cluster: FakeCluster) -> None:
    source, target = write(tmp_path / "in", *(ask(str(i)) for i in range(20))), tmp_path / "out"
    command = ["batch", str(source), str(target), "--url", url, "--concurrency", "4"]
    assert run(command) == 0
    found = read(target)
    assert len(found) == 20
    for row in found.values():
        assert row["response"]["body"]["choices"][0]["message"]["content"] == "Yes."
        assert row["error"] is None
    assert run(command) == 0
    assert len(cluster.dispatches) == 20


def test_what_failed_or_broke_off_is_asked_again(tmp_path: Path, url: str, cluster: FakeCluster) -> None:
    source, target = write(tmp_path / "in", ask("a"), ask("b", temperature=-1), ask("c")), tmp_path / "out"
    command = ["batch", str(source), str(target), "--url", url]
    assert run(command) == 1
    assert read(target)["r1"]["response"]["status_code"] == 400
    lines = target.read_text().splitlines(keepends=True)
    target.write_text("".join(line for line in lines if "r2" not in line) + '{"custom_id": "r2", "respo')
    write(source, ask("a"), ask("b"), ask("c"))
    assert run(command) == 0
    assert sorted(read(target)) == ["r0", "r1", "r2"]
    assert len(cluster.dispatches) == 2 + 2


def test_a_full_server_is_waited_for_with_patience(tmp_path: Path, url: str, cluster: FakeCluster) -> None:
    source, target = write(tmp_path / "in", ask("a")), tmp_path / "out"
    cluster.refusal = NoNodes("none yet", retry_after=1)
    assert run(["batch", str(source), str(target), "--url", url, "--patience", "0"]) == 1
    assert read(target)["r0"]["response"]["status_code"] == 503
    assert run(["batch", str(source), str(target), "--url", "http://127.0.0.1:9", "--patience", "0"]) == 1
    assert read(target)["r0"]["error"]["code"] == "connection_failed"


@pytest.mark.parametrize("line", ["nonsense", "{}", '{"custom_id": "a", "method": "GET", "url": "/v1", "body": {}}'])
def test_a_line_at_fault_is_named(tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in", ask("a"))
    source.write_text(source.read_text() + line + "\n")
    assert run(["batch", str(source), str(tmp_path / "out")]) == 2
    assert f"{source}:2" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["batch", str(tmp_path / "none"), str(tmp_path / "out")]) == 2
    assert "none" in capsys.readouterr().err
