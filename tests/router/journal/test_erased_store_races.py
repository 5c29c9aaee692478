"""Calls, drains, owners and followers at the moment at which a store loses its data: every token stays there once."""

from __future__ import annotations

import asyncio
from typing import Any

from kvferry.protocol.errors import RegistryUnavailable
from kvferry.router.journal.open_journal import CloseMode
from kvferry.router.journal.recorded_dispatch import FollowedJournal
from kvferry.router.journal.recording import Recording
from tests.router.journal.test_erased_store import HEAD, MANY, Router, add, router, valkey

__all__ = ("router", "valkey")


async def test_journals_are_written_again_although_the_answer_that_showed_the_loss_was_lost(router: Router) -> None:
    journal = router.begin("a")
    add(journal, 1)
    await router.flush()
    await router.erase()
    run = router.journals._scripts.run

    async def unanswered(*args: Any) -> Any:
        await run(*args)
        raise RegistryUnavailable("no answer in time")

    router.journals._scripts.run = unanswered  # type: ignore[method-assign, assignment]
    add(journal, 2)
    await router.flush(1)
    router.journals._scripts.run = run  # type: ignore[method-assign]
    await router.flush()
    assert await router.tokens("a") == (1, 2)


async def test_a_drain_before_the_loss_is_noticed_releases_the_whole_journal(router: Router) -> None:
    journal = router.begin("a")
    add(journal, 1)
    await router.flush()
    await router.erase()
    router.writer.close(journal, CloseMode.RELEASE)
    await router.flush()
    found = await router.journals.read("t", "a")
    assert found is not None
    assert (found.owner, await router.tokens("a"), journal.closed.is_set()) == ("", (1,), True)


async def test_an_owner_that_is_found_while_a_journal_is_written_again_goes_on_alone(router: Router) -> None:
    await router.journals.open("t", "a", "me", HEAD.packed(), key="key", ttl_s=60)
    journal, lost = router.begin("a", key="key", is_opened=True), list[str]()
    journal.on_lost = lambda: lost.append("a")
    add(journal, 1)
    await router.flush()
    await router.erase()
    add(journal, 2)
    await router.flush(1)
    assert journal.must_open
    await router.journals.open("t", "a", "other", HEAD.packed(), key="key", ttl_s=60)
    await router.flush()
    assert (lost, journal.closed.is_set()) == (["a"], True)


async def test_silent_journals_are_checked_that_were_written_just_before_the_loss(router: Router) -> None:
    """One call of many journals writes some of them before the loss and the others after it."""
    journals = [router.begin(f"s{number}") for number in range(MANY)]
    for journal in journals:
        add(journal, 1)
    await router.flush()
    run, calls = router.journals._scripts.run, list[str]()

    async def erasing(name: str, args: Any) -> Any:
        answer = await run(name, args)
        if not calls:
            await router.erase()
        calls.append(name)
        return answer

    router.journals._scripts.run = erasing  # type: ignore[method-assign]
    for journal in journals:
        add(journal, 2)
    await router.flush()
    assert (await router.tokens("s0"), await router.tokens(f"s{MANY - 1}")) == ((1, 2), (1, 2))


async def test_a_follower_gets_every_token_once_of_a_journal_that_is_written_again(router: Router) -> None:
    journal = router.begin("a")
    for token in range(6):
        add(journal, token)
        await router.flush(1)
    followed = FollowedJournal(router.journals, "t", "a", "b", 60.0, Recording(), may_claim=False)
    await followed.read()
    outputs = followed.recording.choices[0].outputs
    await router.erase()
    add(journal, 6)
    reading = asyncio.create_task(followed.read())  # finds nothing yet
    await asyncio.sleep(0.1)
    await router.flush()
    await reading
    add(journal, 7)
    await router.flush()
    await followed.read()
    assert [token for output in outputs for token in output.token_ids] == list(range(8))
    found = await router.journals.read("t", "a")
    assert found is not None
    assert followed.recording.data == found.entries
