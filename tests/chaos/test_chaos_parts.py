"""What the chaos rests on: a plan that is repeated by its seed, a checker that sees a changed token, proxies that cut,
and a report that does not flatter."""

from __future__ import annotations

import asyncio
import io
import random
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
from prometheus_client import generate_latest

from kvferry.cli.supervisor import Supervisor
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.worker_metrics import WorkerMetrics
from tests.chaos.acts import ACTS
from tests.chaos.aftermath import INFLIGHT, VIOLATIONS, Aftermath, sample
from tests.chaos.asking import Answered
from tests.chaos.deeds import Deeds, Done
from tests.chaos.load import Asked, Clients, Ledger, difference, make_bodies
from tests.chaos.look import to_look_into
from tests.chaos.picture import picture
from tests.chaos.plan import ALL, KINDS, Fault, make_plan
from tests.chaos.redis_proxy import Ways
from tests.chaos.report import Run, Storm, summary, table
from tests.chaos.shape import Shape
from tests.chaos.stage import Stage
from tests.chaos.watch import Sample, growth, suspects


def test_a_plan_is_a_function_of_its_seed_and_has_every_kind():
    kinds = tuple(name for name, kind in KINDS.items() if kind.weight)
    plan = make_plan(5, 1200, 3.0, kinds)
    assert plan == make_plan(5, 1200, 3.0, kinds) != make_plan(6, 1200, 3.0, kinds)
    assert {fault.kind for fault in plan} == set(kinds)
    assert 300 < len(plan) < 500
    assert all(3.0 <= fault.at_s < 1197 for fault in plan)


def test_every_kind_of_fault_is_an_act():
    assert set(ACTS) == ALL.keys()


def test_bodies_are_of_all_kinds_and_repeated_by_their_seed():
    bodies = make_bodies(3, 512)
    assert bodies == make_bodies(3, 512)
    assert {body["temperature"] for body in bodies} == {0, 0.8}
    assert len({len(body["prompt"]) for body in bodies}) > 8
    assert any(body.get("n") == 2 for body in bodies)


@pytest.mark.parametrize(
    ("got", "words"),
    [
        ({0: (1, 2, 3)}, ""),
        ({0: (1, 9, 3)}, "apart from 1 on"),
        ({0: (1, 2)}, "2 of 3 tokens"),
        ({0: (1, 2, 3, 3)}, "4 of 3 tokens"),
        ({}, "0 of 3 tokens"),
        ({0: (1, 2, 3), 1: ()}, "choices [0, 1]"),
    ],
)
def test_an_answer_that_differs_anywhere_is_told(got, words):
    assert words in difference(got, {0: (1, 2, 3)})
    assert bool(difference(got, {0: (1, 2, 3)})) == bool(words)


async def test_one_way_is_cut_or_frozen_and_the_others_flow():
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    ways = await asyncio.to_thread(Ways, ("a", "b"), "127.0.0.1", server.sockets[0].getsockname()[1])

    async def asked(name: str) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", ways.ports[name])
        try:
            writer.write(b"ping\n")
            return await asyncio.wait_for(reader.readline(), 0.5)
        finally:
            writer.transport.abort()

    try:
        assert await asked("a") == b"ping\n"
        ways.order("a", "cut")
        await asyncio.sleep(0.3)
        with pytest.raises((ConnectionError, AssertionError)):
            assert await asked("a") == b"ping\n"
        assert await asked("b") == b"ping\n"
        ways.order("a", "heal")
        ways.order("b", "freeze")
        await asyncio.sleep(0.3)
        assert await asked("a") == b"ping\n"
        with pytest.raises(TimeoutError):
            await asked("b")
    finally:
        await asyncio.to_thread(ways.close)
        server.close()


async def test_a_process_that_says_no_or_nothing_is_told_apart_from_one_that_obeys(tmp_path):
    answers = [b'{"answer": null}\n', b'{"error": "no engine"}\n', b""]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answers.pop(0))
        writer.close()

    supervisor = SimpleNamespace(children=[SimpleNamespace(name="decode-0", pid=None)])
    stage = Stage(Shape(tmp_path), cast(Supervisor, supervisor), None)
    async with await asyncio.start_unix_server(answer, tmp_path / "decode-0.sock"):
        assert await stage.order("decode-0", "sever") is None
        with pytest.raises(OSError, match="no engine"):
            await stage.order("decode-0", "hang")
        with pytest.raises(OSError, match="no answer"):
            await stage.order("decode-0", "hang")
    with pytest.raises(ProcessLookupError):
        stage.signal("decode-0", 9)


async def test_a_fault_that_could_not_be_had_is_no_fault(tmp_path):
    stage = Stage(Shape(tmp_path), cast(Supervisor, SimpleNamespace(children=[])), io.StringIO())
    deeds = Deeds(stage, None, 1)
    await deeds.commit([Fault(0.0, "link loss", "decode-0", 0.01, 0.1)], 0.0)
    run = Run(1, 1, [(Ledger(), (0.0, 5.0))])
    run.add(Ledger(), (100.0, 105.0), deeds, Aftermath(0.3))
    figures = summary(run)
    assert (figures["faults"], figures["kinds"], len(figures["failed"])) == (0, {}, 1)
    assert "could not be had: link loss decode-0" in table(figures)


def test_the_books_are_read_from_metrics_that_there_are():
    router, node = generate_latest(RouterMetrics().registry).decode(), generate_latest(WorkerMetrics("decode").registry)
    assert sample(router, INFLIGHT) == sample(router, VIOLATIONS["router"]) == 0
    assert sample(node.decode(), VIOLATIONS["node"]) == 0
    with pytest.raises(LookupError):
        sample(router, VIOLATIONS["node"])


def made_run(asked: list[Asked], after: Aftermath, done: list[Done] | None = None) -> Run:
    calm = Ledger(asked=[Asked(0, 0.0, 1.0, 100, 0.1, (0.5, 0.1))], arrivals=[(4.0, 200)])
    stormy = Ledger(asked=asked, arrivals=[(101.0, 50), (103.5, sum(each.tokens for each in asked))])
    return Run(1, 1, [(calm, (0.0, 5.0))], stormy, [(100.0, 105.0)], done or [], [], [after])


def fine(error: str = "", router: bool = False, pause_s: float = 0.2, tokens: int = 80) -> Asked:
    return Asked(0, 100.0, 101.0, tokens, 0.1, (100.5, pause_s), error, router)


def test_a_run_without_a_flaw_meets_all_goals():
    figures = summary(made_run([fine(), fine()], Aftermath(0.3)))
    assert all(figures["goals"].values())
    assert figures["goodput"] == 80.0


@pytest.mark.parametrize(
    ("asked", "after", "missed"),
    [
        ([fine(), fine("503 no_nodes")], Aftermath(0.3), "errors"),
        ([fine(), fine(), fine("changed: 1", router=True)], Aftermath(0.3), "changed"),
        ([fine(), fine(pause_s=3.5)], Aftermath(0.3), "pause_p99_s"),
        ([fine(tokens=10)], Aftermath(0.3), "goodput"),
        ([fine(), fine()], Aftermath(None, remains={"decode-0": "busy"}), "idle_s"),
        ([fine(), fine()], Aftermath(0.3, leaks={"grant": 2}), "leaked"),
        ([fine(), fine()], Aftermath(0.3, violations=1), "books"),
    ],
)
def test_each_flaw_misses_its_goal(asked, after, missed):
    figures = summary(made_run(asked, after))
    assert not figures["goals"][missed]
    assert f"{missed} MISSED" in table(figures)


@pytest.mark.parametrize("streams", [True, False])
async def test_tokens_of_a_broken_answer_are_counted_to_be_taken_off(streams, monkeypatch):
    clients = Clients({}, [{"stream": streams}], lambda *_: False)
    clients.expected[0] = {0: (1, 2, 3)}

    async def answer(asking, router):
        asking._count(2)
        asking._count(1)
        raise Answered("in stream: overloaded")

    monkeypatch.setattr(clients, "answer", answer)
    assert not await clients._once(0, "router-0", clients.bodies[0])
    await clients.close()
    (asked,) = clients.book.asked
    assert asked.tokens == sum(tokens for _, tokens in clients.book.arrivals) == 3
    assert (asked.pause is not None) == streams


def test_what_did_not_stream_paused_nowhere():
    whole = [replace(fine(), pause=None)] * 200
    figures = summary(made_run([fine(pause_s=3.5), *whole], Aftermath(0.3)))
    assert figures["pause_p99_s"] == 3.5
    assert to_look_into(made_run(whole, Aftermath(0.3)))["pauses"] == []


@pytest.mark.parametrize(
    ("storm", "met"),
    [(Storm(64, 60, 0, 0.4), True), (Storm(64, 0, 64, 0.1), False), (Storm(64, 64, 0, None), False)],
)
def test_a_storm_of_clients_that_nobody_served_is_none(storm, met):
    run = made_run([fine()], Aftermath(0.3))
    run.disconnects["decode"] = storm
    assert summary(run)["goals"]["disconnects"] == met


async def test_a_client_that_is_answered_too_late_was_refused_and_did_not_leave(monkeypatch):
    monkeypatch.setattr("tests.chaos.load.PATIENCE_S", 0.01)
    clients = Clients({}, [{}], lambda *_: False)

    async def slow(router, body, count):
        await asyncio.sleep(1)

    async def quick(router, body, count):
        count(1)

    for ask in (slow, quick):
        monkeypatch.setattr(clients, "ask", ask)
        await clients.leave(2, random.Random(1), lambda seen: seen >= 1)
    await clients.close()
    assert (clients.book.left, clients.book.refused) == (2, 2)


def test_what_was_taken_up_again_is_counted_and_an_error_behind_a_killed_router_is_one():
    asked = [fine(), replace(fine(router=True), tries=3, began_anew=True), replace(fine(router=True), tries=2)]
    figures = summary(made_run(asked, Aftermath(0.3)))
    assert figures["goals"]["errors"]
    assert (figures["through_a_disturbed_router"], figures["resumed"], figures["began_anew"]) == (2, 2, 1)
    assert not summary(made_run([*asked, fine("503", router=True)], Aftermath(0.3)))["goals"]["errors"]


def test_what_the_clients_own_loop_was_late_is_no_pause():
    run = made_run([fine(pause_s=3.5), fine()], Aftermath(0.3))
    run.late = [(90.0, 91.0), (100.0, 101.0), (103.8, 105.0)]
    figures = summary(run)
    assert (figures["pause_max_s"], figures["lag_max_s"]) == (2.8, 1.2)
    assert figures["goals"]["pause_p99_s"]


def test_pauses_beside_a_crowd_are_told_apart():
    asked = [replace(fine(), pause=pause) for pause in ((100.2, 0.1), (101.5, 3.4), (100.5, 0.6), (111.0, 0.3))]
    figures = summary(made_run(asked, Aftermath(0.3), [Done(Fault(1.0, "crowd", "clients"), 101.0, 105.0)]))
    assert (figures["pause_max_s"], figures["apart_from_crowds"]) == (3.4, [0.3, 0.3])
    assert "apart from crowds p99 0.3 s, max 0.3 s" in table(figures)


def test_the_picture_has_a_line_for_each_fault():
    done = [Done(Fault(0.5, "kill", "decode-0"), 100.5, 101.5, 1.0), Done(Fault(1.0, "crowd", "clients"), 101.0)]
    tree = ElementTree.fromstring(picture(made_run([fine()], Aftermath(0.3), done)))  # noqa: S314 - our own
    words = "".join(tree.itertext())
    assert "kill decode-0" in words
    assert "crowd clients" in words


def test_a_process_that_grows_is_suspected_and_a_restarted_one_is_not():
    def sample(at: int, name: str, pid: int, fds: int) -> Sample:
        return Sample(float(at), name, pid, {"rss_mib": 100, "fds": fds, "threads": 5})

    leaking = [sample(at, "decode-0", 1, 40 + at) for at in range(80)]
    restarted = [sample(at, "decode-1", at // 40, 40 + 100 * (at // 40)) for at in range(80)]
    busy = [sample(at, "router-0", 3, 80 if at % 20 < 5 or at > 60 else 44) for at in range(80)]
    over = [sample(at, "router-1", 4, 50 if at < 40 else 83) for at in range(80)]
    leaks = [sample(at, "router-1", 5, 50 + 2 * at) for at in range(80)]
    assert suspects(growth(leaking + restarted + busy + over), streams=16) == ["decode-0 fds 79 → 109"]
    assert suspects(growth(leaks), streams=16) == ["router-1 fds 128 → 189"]
