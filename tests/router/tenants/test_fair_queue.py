"""The fair queue, without a clock: who is next."""

from __future__ import annotations

from collections import Counter, deque
from math import inf
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from kvferry.router.tenants.fair_queue import FairQueue
from kvferry.router.tenants.tenant import Tenant
from kvferry.router.tenants.tenant_queue import MAX_SESSIONS, Slot, Window

A, B = Tenant("a"), Tenant("b")
ONE = Window(1, inf)


def serve(queue: FairQueue, count: int, window: Window = ONE) -> list[Slot]:
    """One after another, each as large as it was thought to be."""
    served = []
    while len(served) < count and (turn := queue.next(window)) is not None:
        queue.record_first_token(turn, 1.0)
        queue.end(turn, turn.prompt, turn.output)
        served.append(turn)
    return served


def names(turns: list[Slot]) -> list[str]:
    return [turn.queue.tenant.name for turn in turns]


def test_who_comes_alone_begins_at_once() -> None:
    queue = FairQueue()
    turn = queue.add(A, 1, 100, 10)
    assert queue.next(Window()) is turn
    assert queue.queued == 0


def test_two_that_wait_take_turns_however_many_one_has() -> None:
    queue = FairQueue()
    for _ in range(20):
        queue.add(A, 1, 100, 10)
    serve(queue, 3)
    for _ in range(3):
        queue.add(B, 1, 100, 10)
    assert names(serve(queue, 6)).count("b") == 3


def test_work_is_what_counts_not_requests() -> None:
    queue = FairQueue()
    for _ in range(60):
        queue.add(A, 1, 1000, 1)
        queue.add(B, 1, 100, 1)
    served = Counter(names(serve(queue, 44)))
    assert 7 <= served["b"] / served["a"] <= 11


def test_a_share_weighs() -> None:
    queue = FairQueue()
    heavy = Tenant("h", share=3.0)
    for _ in range(40):
        queue.add(heavy, 1, 100, 10)
        queue.add(A, 1, 100, 10)
    served = Counter(names(serve(queue, 40)))
    assert 28 <= served["h"] <= 32


def test_a_class_goes_before_the_next() -> None:
    queue = FairQueue()
    late = Tenant("late", priority=1)
    queue.add(late, 1, 10, 1)
    for _ in range(5):
        queue.add(A, 1, 1000, 100)
    assert names(serve(queue, 6)) == ["a"] * 5 + ["late"]


def test_priority_orders_a_tenants_own() -> None:
    queue = FairQueue()
    turns = [queue.add(A, 1, 10, 1, priority) for priority in (5, 0, 5, -1)]
    assert serve(queue, 4) == [turns[3], turns[1], turns[0], turns[2]]


def test_a_pause_earns_no_credit() -> None:
    queue = FairQueue()
    for _ in range(30):
        queue.add(A, 1, 100, 10)
    queue.add(B, 1, 100, 10)
    serve(queue, 21)
    for _ in range(10):
        queue.add(B, 1, 100, 10)
    assert 4 <= names(serve(queue, 10)).count("b") <= 6


def test_what_was_underestimated_is_paid_later() -> None:
    queue = FairQueue()
    for _ in range(10):
        queue.add(A, 1, 10, 10_000)
        queue.add(B, 1, 10, 10_000)
    first = queue.next(ONE)
    assert first is not None
    assert first.queue.tenant is A
    queue.record_first_token(first, 1.0)
    queue.end(first, 10, 5000)
    assert "a" not in names(serve(queue, 5))


def test_a_flood_leaves_half_of_a_shared_window_and_newcomers_begin_at_once() -> None:
    queue = FairQueue()
    window = Window(16, inf, True)
    for _ in range(64):
        queue.add(A, 1, 100, 100)
    flood = [turn for _ in range(64) if (turn := queue.next(window))]
    assert len(flood) == 8
    newcomer = queue.add(B, 1, 100, 100)
    assert queue.next(window) is newcomer
    assert queue.next(window) is None


def test_prompts_are_held_back_until_the_ones_before_are_computed() -> None:
    queue = FairQueue()
    window = Window(100, 200, True)
    for _ in range(3):
        queue.add(A, 1, 1000, 100)
    first = queue.next(window)
    assert first is not None
    assert queue.next(window) is None
    other = queue.add(B, 1, 1000, 100)
    assert queue.next(window) is other
    queue.record_first_token(first, 1.0)
    assert queue.next(window) is not None


def test_one_larger_than_the_window_begins_alone() -> None:
    queue = FairQueue()
    small = queue.add(A, 1, 10, 1)
    large = queue.add(A, 500, 10, 1)
    window = Window(8, inf)
    assert queue.next(window) is small
    assert queue.next(window) is None
    queue.end(small, 10, 1)
    assert queue.next(window) is large


def test_who_leaves_while_it_waits_is_passed_over() -> None:
    queue = FairQueue()
    turns = [queue.add(A, 1, 10, 1) for _ in range(200)]
    for turn in turns[:-1]:
        queue.end(turn)
        queue.end(turn)
    assert queue.queued == 1
    queue.add(A, 1, 10, 1)
    assert len(turns[0].queue.waiting) == 2
    assert queue.next(ONE) is turns[-1]


def test_a_cached_prompt_counts_for_what_is_computed_of_it() -> None:
    queue = FairQueue()
    for _ in range(30):
        turn = queue.add(A, 1, 1000, 1)
        assert queue.next(Window()) is turn
        queue.record_first_token(turn, 0.05)
        queue.end(turn, 50, 1)
    assert queue.add(A, 1, 1000, 1).prompt < 100


def test_work_ahead_of_a_turn() -> None:
    queue = FairQueue()
    running = queue.add(A, 1, 16, 1)
    assert queue.next(ONE) is running
    for _ in range(10):
        queue.add(A, 1, 96, 1)
    assert queue.work_ahead(queue.add(B, 1, 96, 1)) == 100
    assert queue.work_ahead(queue.add(A, 1, 96, 1)) == 1000 + 100
    assert queue.work_ahead(queue.add(A, 1, 96, 1, priority=-1)) == 100


requests = st.tuples(st.sampled_from("abc"), st.integers(1, 4), st.integers(1, 2000), st.integers(1, 300))


@given(st.lists(requests, min_size=1, max_size=80), st.booleans(), st.randoms(use_true_random=False))
def test_nothing_is_lost_and_the_books_balance(wanted: list, shared: bool, chance: Random) -> None:
    """Whatever comes, begins, gives up and ends in whatever order: all are served, and nothing stays counted."""
    queue, window = FairQueue(), Window(6, 700, shared)
    waiting, running, left = [], [], deque(wanted)
    served = 0
    while left or waiting or running:
        if left and chance.random() < 0.5:
            name, sequences, prompt, output = left.popleft()
            waiting.append(queue.add(Tenant(name), sequences, prompt, output))
        if waiting and chance.random() < 0.1:
            queue.end(waiting.pop())
            served += 1
        while (turn := queue.next(window)) is not None:
            waiting.remove(turn)
            running.append(turn)
        assert running or not waiting
        if running and (not left or chance.random() < 0.5):
            turn = running.pop(chance.randrange(len(running)))
            if chance.random() < 0.5:
                queue.record_first_token(turn, chance.random())
            queue.end(turn, turn.prompt, 3)
            served += 1
    assert served == len(wanted)
    assert (queue.queued, queue._running, queue._sequences, queue._prompt) == (0, 0, 0, 0)
    for lane in queue._queues.values():
        assert (lane.queued, lane.sequences, lane.prompt, round(lane.work)) == (0, 0, 0, 0)


def test_a_newcomer_is_who_had_less_than_those_whose_requests_are_under_way() -> None:
    queue, window = FairQueue(), Window(16, inf, shared=True)

    def begun(tenant: Tenant) -> Slot:
        queue.add(tenant, 1, 100, 10)
        turn = queue.next(window)
        assert turn is not None
        return turn

    flood = [begun(A) for _ in range(6)]
    assert not any(turn.newcomer for turn in flood), "who is alone is no newcomer"
    first = begun(B)
    assert first.newcomer
    queue.end(first, 100, 10)
    for _ in range(40):
        queue.end(flood.pop(0), 100, 10)
        flood.append(begun(A))
        assert not flood[-1].newcomer
    greedy = []
    while len(greedy) < 100:
        queue.add(B, 1, 1000, 10)
        turn = queue.next(window)
        assert turn is not None
        queue.end(turn, 1000, 10)
        greedy.append(turn.newcomer)
    assert 1 <= sum(greedy) <= 16, "it had more than the flood then, whose work did not go on"


def test_tenants_that_want_as_much_are_no_newcomers_to_each_other() -> None:
    queue, window = FairQueue(), Window(16, inf, shared=True)
    under_way: deque[Slot] = deque()
    flags = []
    for _ in range(200):
        queue.add(A, 1, 100, 10)
        queue.add(B, 1, 100, 10)
        while (turn := queue.next(window)) is not None:
            under_way.append(turn)
            flags.append(turn.newcomer)
        queue.end(under_way.popleft(), 100, 10)
    assert sum(flags[4:]) == 0


def test_a_newcomer_stays_one_while_a_flood_that_came_at_once_is_worked_off() -> None:
    """By start tags alone its second request had overtaken the flood's last one."""
    queue, window = FairQueue(), Window(64, inf, shared=True)
    for _ in range(40):
        queue.add(A, 1, 64, 64)
    while queue.next(window) is not None:
        pass
    for _ in range(5):
        queue.add(B, 1, 512, 8)
        turn = queue.next(window)
        assert turn is not None
        assert turn.newcomer
        queue.record_first_token(turn, 1.0)
        queue.end(turn, 512, 8)


def test_short_prompts_do_not_wait_for_the_long_ones_of_another() -> None:
    """Of 8,000 tokens two fill the window for as long as they are computed; the other tenant's are a small part."""
    queue, window = FairQueue(), Window(64, 60, shared=True)
    for _ in range(2):
        queue.add(A, 1, 8000, 8)
    assert queue.next(window) is not None
    assert queue.next(window) is None, "a tenant has half of it"
    begun = 0
    while begun < 100:
        queue.add(B, 1, 48, 8)
        turn = queue.next(window)
        if turn is None:
            break
        assert turn.newcomer
        begun += 1
    assert 20 < begun < 64, "as long as all of them are less than half of what the other has under way"


def test_a_turn_tells_how_many_of_its_sequences_may_be_at_the_nodes() -> None:
    queue = FairQueue()
    for sequences, at_once in ((128, 16), (3, 3)):
        turn = queue.add(A, sequences, 10, 10)
        assert queue.next(Window(32, inf, shared=True)) is turn
        assert turn.at_once == at_once
        queue.end(turn)


def test_forty_agents_of_one_tenant_take_turns_with_another_tenants_chat() -> None:
    queue = FairQueue()
    for agent in range(40):
        for _ in range(5):
            queue.add(A, 1, 8000, 100, session=f"agent{agent}")
    serve(queue, 40)
    queue.add(B, 1, 100, 100, session="chat")
    assert "b" in names(serve(queue, 2))


def test_sessions_of_a_tenant_take_turns_however_many_requests_one_has() -> None:
    queue = FairQueue()
    fan_out = [queue.add(A, 1, 1000, 10, session="fan-out") for _ in range(40)]
    serve(queue, 10)
    chat = queue.add(A, 1, 1000, 10, session="chat")
    served = serve(queue, 2)
    assert chat in served
    more = [queue.add(A, 1, 1000, 10, session="chat") for _ in range(3)]
    assert len([turn for turn in serve(queue, 6) if turn in more]) == 3
    serve(queue, 100)
    assert all(turn.ended for turn in fan_out)


def test_a_tenants_requests_without_a_session_go_in_order_and_priority_goes_before_fairness() -> None:
    queue = FairQueue()
    plain = [queue.add(A, 1, 100, 10) for _ in range(5)]
    urgent = [queue.add(A, 1, 1000, 10, -1, session="s") for _ in range(3)]
    assert serve(queue, 8) == [*urgent, *plain]


def test_sessions_that_ended_are_forgotten() -> None:
    queue = FairQueue()
    for number in range(5 * MAX_SESSIONS):
        queue.add(A, 1, 100, 10, session=str(number))
        serve(queue, 1)
    assert len(queue._queues["a"].sessions) <= MAX_SESSIONS
