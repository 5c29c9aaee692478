"""The process that tries grammars, as a hostile client and a busy machine would have it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from kvferry.protocol.errors import InvalidRequest, Overloaded
from kvferry.protocol.work import Grammar
from kvferry.router.text.grammar_vocabulary import vocabulary_of
from kvferry.structured_output.checker import PENDING, RUNAWAYS, Checker
from tests.api_parts import demo_text

CHILD = (
    "import sys, json, time\n"
    "sys.stdin.readline(); print('[-1, null]', flush=True)\n"
    "late = True\n"
    "for line in sys.stdin:\n"
    "    number, grammar = json.loads(line)\n"
    "    if grammar[1] == 'busy' and late: late = False; continue\n"
    "    wrong = 'x' * 200_000 if grammar[1] == 'long' else None\n"
    "    if grammar[1] != 'hang': print(json.dumps([number, wrong]), flush=True)\n"
)


def checker_of(*command: str) -> Checker:
    return Checker(lambda: vocabulary_of(demo_text()), command)


async def test_what_took_too_long_on_a_busy_machine_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.structured_output.checker.CHECK_S", 0.3)
    checker = checker_of(sys.executable, "-c", CHILD)
    try:
        with pytest.raises(InvalidRequest, match="not ready within"):
            await checker.check(Grammar("regex", "busy"), "guided_regex")
        await checker.check(Grammar("regex", "busy"), "guided_regex")
    finally:
        await checker.close()


async def test_a_line_too_long_to_be_read_ends_the_process_and_nobody_waits_for_it() -> None:
    checker = checker_of(sys.executable, "-c", CHILD)
    try:
        with pytest.raises(InvalidRequest, match="crashed the process"):
            await asyncio.wait_for(checker.check(Grammar("regex", "long"), "guided_regex"), 5)
        await asyncio.wait_for(checker.check(Grammar("regex", "fine"), "guided_regex"), 5)
    finally:
        await checker.close()


async def test_those_that_ran_away_leave_no_verdict_on_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What was tried in processes that were ended for them is refused for now, not for good."""
    code = CHILD.replace("'hang'", "('later' if first else '') and not grammar[1].startswith('hang')").replace(
        "late = True",
        f"import pathlib; p = pathlib.Path({str(tmp_path / 'was')!r}); first = not p.exists(); p.touch()\nlate = True",
    )
    monkeypatch.setattr("kvferry.structured_output.checker.CHECK_S", 2.0)
    monkeypatch.setattr("kvferry.structured_output.checker._TRIES", 1)
    checker = checker_of(sys.executable, "-c", code)
    try:
        await checker.check(Grammar("regex", "fine"), "guided_regex")
        runaways = [
            asyncio.create_task(checker.check(Grammar("regex", f"hang{i}"), "guided_regex")) for i in range(RUNAWAYS)
        ]
        await asyncio.sleep(1.0)
        with pytest.raises(Overloaded):
            await checker.check(Grammar("regex", "later"), "guided_regex")
        await checker.check(Grammar("regex", "later"), "guided_regex")
        assert all(isinstance(each, InvalidRequest) for each in await asyncio.gather(*runaways, return_exceptions=True))
    finally:
        await checker.close()


async def test_an_error_that_quotes_all_of_a_grammar_is_cut() -> None:
    checker = checker_of()
    try:
        with pytest.raises(InvalidRequest) as caught:
            await asyncio.wait_for(checker.check(Grammar("k" * 100_000, ""), "guided_regex"), 30)
        assert "kkk" in caught.value.message
        assert len(caught.value.message) < 2000
    finally:
        await checker.close()


async def test_closing_starts_no_other_process() -> None:
    checker = checker_of(sys.executable, "-c", CHILD)
    await checker.check(Grammar("regex", "fine"), "guided_regex")
    waiting = asyncio.create_task(checker.check(Grammar("regex", "hang"), "guided_regex"))
    await asyncio.sleep(0.1)
    await asyncio.wait_for(checker.close(), 5)
    with pytest.raises((InvalidRequest, Overloaded)):
        await waiting
    assert checker._child is None


async def test_one_tenants_grammars_do_not_wait_behind_anothers() -> None:
    code = CHILD.replace("number, grammar =", "time.sleep(0.02); number, grammar =")
    checker = checker_of(sys.executable, "-c", code)
    asked = [checker.check(Grammar("regex", f"a{i}"), "guided_regex", "flood") for i in range(PENDING)]
    flood = [asyncio.create_task(each) for each in asked]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await checker.check(Grammar("regex", "one too many"), "guided_regex", "flood")
    await checker.check(Grammar("regex", "b"), "guided_regex", "other")
    assert sum(task.done() for task in flood) < PENDING / 2
    await checker.close()
    await asyncio.gather(*flood, return_exceptions=True)
