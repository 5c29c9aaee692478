"""Traces: generators by seed, and Mooncake's files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.protocol.errors import ConfigError
from kvferry.simulate.machine import Machine
from kvferry.simulate.mooncake import read_trace
from kvferry.simulate.trace_writer import TraceParams, hashes_of
from kvferry.simulate.workloads import WORKLOADS

NODE = Machine()


def test_hashes_are_equal_as_far_as_the_text_is() -> None:
    one = hashes_of([("a", 40), ("b", 40)], 16)
    other = hashes_of([("a", 40), ("c", 40)], 16)
    assert len(one) == len(other) == 5
    assert [x == y for x, y in zip(one, other, strict=True)] == [True, True, False, False, False]
    assert hashes_of([("a", 15)], 16) == ()


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_is_a_trace(name: str) -> None:
    make = WORKLOADS[name]
    asked = TraceParams(200, 20, 5)
    trace = make(asked)
    assert trace == make(asked)
    assert trace != make(TraceParams(200, 20, 6))
    assert 200 <= len(trace) < 300
    numbers = [ask.number for ask in trace]
    assert sorted(numbers) == list(range(len(trace)))
    for ask in trace:
        assert len(ask.hashes) == (ask.prompt_len + ask.output_len) // 64
        assert ask.after < ask.number
        assert ask.at >= 0


def row(**changes: object) -> str:
    known = {"timestamp": 1500, "input_length": 1100, "output_length": 30, "hash_ids": [1, 2, 3]}
    return json.dumps({**known, **changes})


def test_mooncakes_rows_become_requests(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join((row(), "", row(timestamp=3000, hash_ids=[1, 2, 9]))) + "\n")
    first, second = read_trace(path, NODE, speed=3.0)
    assert (first.at, second.at) == (0.0, 0.5)
    assert len(first.hashes) == (1100 + 30) // 64
    assert first.hashes[:16] == second.hashes[:16]
    assert first.hashes[16] != second.hashes[16]
    assert len(read_trace(path, NODE, most=1)) == 1


def test_a_traces_pictures_and_seconds_of_audio_are_media(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    shown = [{"id": "p", "offset": 4, "tokens": 64}, {"id": 7, "offset": 100, "audio_s": 4.5}]
    path.write_text(row(media=shown) + "\n" + row())
    first, second = read_trace(path, replace(NODE, audio_tokens_per_s=12.5))
    assert first.media == (("p", 4, 64), ("7", 100, 57))
    assert second.media == ()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (row(media={}), "media must be a list"),
        (row(media=[1]), r"media\[0\] must be an object"),
        (row(media=[{"offset": 0, "tokens": 9}]), r"media\[0\].id must be an integer or a string, not None"),
        (row(media=[{"id": 1, "offset": 0}]), r"media\[0\] must have either tokens or audio_s"),
        (row(media=[{"id": 1, "offset": 0, "tokens": 9, "audio_s": 1}]), "either tokens or audio_s"),
        (row(media=[{"id": 1, "offset": 0, "audio_s": -1}]), r"media\[0\].audio_s must be above 0 and at most 86400"),
        (row(media=[{"id": 1, "offset": 0, "audio_s": float("nan")}]), "audio_s"),
        (row(media=[{"id": 1, "offset": 0, "tokens": 0}]), r"media\[0\].tokens must be an integer from 1 on, not 0"),
        (row(media=[{"id": 1, "offset": 0.5, "tokens": 9}]), r"media\[0\].offset must be an integer from 0 on"),
        (row(media=[{"id": 1, "offset": 1095, "tokens": 9}]), "between 0 and input_length 1100"),
        (row(media=[{"id": each, "offset": 5, "tokens": 9} for each in (1, 2)]), r"media\[1\] takes the tokens from 5"),
        ("{", "line 1 is not valid JSON: Expecting property name"),
        ("[]", "line 1: a request must be an object"),
        ('{"timestamp": 1}', "line 1: input_length is missing"),
        ("[" * 100_000, "line 1"),
        (row(input_length=-1), "input_length must be from 1"),
        (row(output_length="x"), "output_length"),
        (row(timestamp=float("nan")), "timestamp"),
        (row(timestamp=10**400), "timestamp must be milliseconds from 0 to 1e.15"),
        (row(timestamp=1e308), "timestamp"),
        (row(hash_ids=[1]), "hash_ids must be 2 or 3 for input_length 1100, one for each 512 tokens, not 1"),
        (row(hash_ids=[1, 2, 3, 4]), "not 4"),
        (row(hash_ids=[-1, 2, 3]), "hash_ids"),
        ("", "no requests"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, told: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match=told):
        read_trace(path, NODE)


def test_an_id_behind_others_names_other_blocks(tmp_path: Path) -> None:
    """A pool holds a block behind one parent only: a file with ids of contents alone broke it."""
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join((row(hash_ids=[1, 2, 3]), row(hash_ids=[4, 2, 2]), row(hash_ids=[1, 2, 4]))))
    first, other, same = (ask.hashes[:17] for ask in read_trace(path, NODE))
    assert not set(first) & set(other)
    assert len(set(other)) == 17
    assert first[:16] == same[:16]


def test_times_are_from_the_earliest_request_on_whatever_comes_first(tmp_path: Path) -> None:
    """A trace may tell the time of day, for which no clock is to run through fifty years."""
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(row(timestamp=1_700_000_000_000 + late) for late in (2000, 0, 500)))
    assert [round(ask.at, 3) for ask in read_trace(path, NODE)] == [2.0, 0.0, 0.5]


def test_a_file_that_is_not_there_and_blocks_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none", NODE)
    with pytest.raises(ConfigError, match="block_size must divide 512"):
        read_trace(tmp_path / "none", replace(NODE, block_size=100))
    with pytest.raises(ConfigError, match="above 0"):
        TraceParams(1, 0)
