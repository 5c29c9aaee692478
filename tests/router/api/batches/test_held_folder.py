"""A batch on a disk that several processes share: only the last holder's answers count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.router.batch.batch import Batch
from kvferry.router.batch.batch_folder import BatchFolder
from kvferry.router.batch.files import FileStore
from kvferry.router.batch.held_folder import HeldFolder, hold
from kvferry.router.batch.rows import Row, RowReader
from kvferry.router.batch.stores import LostBatch
from tests.batch_parts import CHAT, chat, rows


def line(custom_id: str) -> bytes:
    return json.dumps({"custom_id": custom_id}).encode() + b"\n"


@pytest.fixture
def folder(tmp_path: Path) -> BatchFolder:
    return BatchFolder(tmp_path)


@pytest.fixture
def batch(folder: BatchFolder) -> Batch:
    made = Batch.new(CHAT, "file-x", "", None)
    folder.create(made)
    return made


def held(folder: BatchFolder, batch: Batch) -> HeldFolder:
    found = hold(folder, batch.id, locks=False)
    assert found is not None
    return found


def published(folder: BatchFolder, holder: HeldFolder) -> list[str]:
    files = FileStore(folder.root, "", 2**20)
    file_id = holder.publish(files, ok=True)
    assert file_id is not None
    content, _ = files.open(file_id)
    with content:
        return [json.loads(each)["custom_id"] for each in content]


def test_what_an_earlier_holder_appends_does_not_count(folder: BatchFolder, batch: Batch) -> None:
    first = held(folder, batch)
    first.append("a", line("a"), ok=True)
    late = (folder.folder(batch.id, 1) / "output.jsonl").open("ab")
    second = held(folder, batch)
    with late:
        late.write(line("b"))  # its check was before the second one came
    assert second.done == {"a"}
    second.append("b", line("b"), ok=True)
    for write in (first.save, first.check, lambda: first.append("c", line("c"), ok=True)):
        with pytest.raises(LostBatch):
            write()
    third = held(folder, batch)
    assert third.done == {"a", "b"}
    assert third.batch.request_counts == {"total": 0, "completed": 2, "failed": 0}
    third.append("c", line("c"), ok=True)
    assert published(folder, third) == ["a", "b", "c"]
    third.batch.move("completed")
    third.save()
    third.clear()
    assert hold(folder, batch.id, locks=False) is None
    assert folder.get(batch.id).status == "completed"
    assert list(folder.root.rglob("*.jsonl")) == []


def test_a_line_that_broke_off_is_answered_again(folder: BatchFolder, batch: Batch) -> None:
    first = held(folder, batch)
    first.append("a", line("a"), ok=True)
    first.append("b", line("b")[:-3], ok=True)
    second = held(folder, batch)
    assert second.done == {"a"}
    second.append("b", line("b"), ok=True)
    assert published(folder, second) == ["a", "b"]


def test_a_holder_that_died_before_it_saved_is_passed(folder: BatchFolder, batch: Batch) -> None:
    held(folder, batch).append("a", line("a"), ok=False)
    folder.folder(batch.id, 2).mkdir()
    third = held(folder, batch)
    assert third.done == {"a"}
    assert folder.owners(batch.id) == [3, 2, 1]


def test_state_of_an_older_release_goes_on(folder: BatchFolder, batch: Batch) -> None:
    (folder.folder(batch.id) / "output.jsonl").write_bytes(line("a"))
    holder = held(folder, batch)
    assert holder.done == {"a"}
    holder.append("b", line("b"), ok=True)
    assert published(folder, holder) == ["a", "b"]


def test_rows_do_not_depend_on_the_cuts_of_their_file() -> None:
    content = b"\n" + rows(chat("a"), chat("b", seed=7), chat("c")) + b"\nno json\n" + rows(chat("d"))
    whole = RowReader(CHAT, "batch_x")
    expected = [*whole.feed(content), *whole.end()]
    assert [each.number for each in expected if isinstance(each, Row)] == [0, 1, 2]
    seeds = [json.loads(each.body)["seed"] for each in expected if isinstance(each, Row)]
    assert seeds[1] == 7
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)
    for size in (1, 2, 7, 100):
        cut = RowReader(CHAT, "batch_x")
        pieces = [content[at : at + size] for at in range(0, len(content), size)]
        assert [row for piece in pieces for row in cut.feed(piece)] + cut.end() == expected
    other = RowReader(CHAT, "batch_y")
    assert next(json.loads(row.body)["seed"] for row in other.feed(content) if isinstance(row, Row)) != seeds[0]
