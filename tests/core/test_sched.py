"""The scheduler without a model or an array, on a simulated clock. Stages 5 to 8 of course/from_zero test the
reader's own scheduler with the same `Story`."""

import gc
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from long_forms import number_of
from scheduler_story import BAD, Story, timeline

from models.memory import usual_budget
from policies import POLICIES, policy_of
from prefix import SEGMENT, Node, Prefixes, Trail
from request import PADDING, Committed, Plan, QueueFull, Request
from sched import Scheduler, check_invariants

SCHEDULES = number_of("SCHEDULES", 500)  # 100,000 take six minutes


def test_serial_runs_one_request_at_a_time():
    story = Story(policy="serial")
    story.submit_all((3, 2), (3, 2))
    assert story.drawn() == timeline("""
         1 | A:p
         2 | A:d
         3 | B:p
         4 | B:d
    """)


def test_fair_prefers_the_client_with_fewest_slots():
    """One client submits four requests, then another client submits one, which is admitted second instead of
    last."""
    story = Story(policy="fair")
    for _ in range(4):
        story.submit(3, 2, client="many")
    story.submit(3, 2, client="one")
    assert story.drawn() == timeline("""
         1 | A:p E:p
         2 | A:d E:d
         3 | B:p C:p
         4 | B:d C:d
         5 | D:p
         6 | D:d
    """)


def test_fair_breaks_ties_by_last_service():
    """While the only slot is free, no client has one, so the client that was served longest ago is next: C
    overtakes B."""
    story = Story(slots=1, policy="fair")
    for client in ("many", "many", "two", "two", "many"):
        story.submit(3, 1, client=client)
    assert [line.split()[2] for line in story.drawn()] == ["A:p", "C:p", "B:p", "D:p", "E:p"]


def test_a_cancel_gives_its_client_no_second_turn():
    """Regression: A is served, and B, the next request of its client, is cancelled. C of the same client then
    overtook D of the other client, because only B recorded that its client had been served."""
    story = Story(slots=1, policy="fair")
    clients = ("many", "many", "many", "one")
    _, second, *_ = [story.submit(3, 1, client=client) for client in clients]
    story.step()
    story.sched.finish(second, "cancelled", story.now)
    assert [line.split()[2] for line in story.drawn()] == ["A:p", "D:p", "C:p"]


class Name(str):
    """A client's name that counts how often it is hashed."""

    count = 0

    def __hash__(self):
        Name.count += 1
        return super().__hash__()


def test_fair_is_linear_in_the_queue():
    """Regression: 64 slots are free, and each of 10,000 clients has a queued request. The plan took 349 ms,
    since it looked at all of them for each slot."""
    scheduler = Scheduler(64, 100, POLICIES["fair"], budget=1_000)
    for id in range(10_000):
        scheduler.submit(Request(id, (1, 2, 3), 2, 0.0, client=Name(f"client {id}")))
    Name.count = 0
    plan = scheduler.plan(0.0)
    assert [request.id for request in plan.admitted] == list(range(64))
    assert Name.count <= 3 * 10_000


def test_short_ages_by_a_token_a_step():
    """A prompt of one token arrives in every step. The prompt of ten is overtaken by those of the first
    nine steps."""
    story = Story(slots=1, policy="short", chunk=32, budget=32)
    late = story.submit(10, 1)
    while late.finish_reason is None:
        story.submit(1, 1)
        story.step()
    assert story.plans[-1].chunks[0].request is late and len(story.plans) == 10


def test_each_admission_says_why_it_got_its_slot():
    """Regression: the plan did not say why it chose one of several free slots."""
    story = Story(slots=3)

    def why(*prompts: tuple[int, ...]) -> list[tuple[int, str]]:
        requests = [story.submit(prompt, 1) for prompt in prompts]
        story.drawn()
        return [(request.slot, request.admission.why) for request in requests]

    chat, other, third = (tuple(range(n, n + 20)) for n in (0, 100, 200))
    assert why(chat, other) == [(0, "empty"), (1, "empty")]
    assert why((*chat, 77)) == [(0, "has its first 20 rows")]
    assert why((*chat[:12], 78)) == [(2, "empty")]
    assert why((*chat[:12], 79)) == [(2, "has its first 12 rows; loses 1")]
    assert why(third, third, third) == [
        (2, "loses 1 row"),
        (1, "loses 20 rows"),
        (0, "the only free slot"),
    ]
    assert why((1, 2, 3)) == [(1, "nothing is lost")]


def test_chunks_next_to_decodes_are_as_long_as_the_engine_allows():
    """B's chunks have up to 8 tokens, but only 3 while A decodes, because the step-time model allows no more
    next to a decode. The plan's budget is what the step can use."""
    story = Story(slots=2, max_len=100, chunk=8, budget=20)
    story.submit(3, 4)
    story.step()
    story.submit(24, 1)
    story.step_time = FixedRoom(3)
    assert story.drawn() == timeline("""
         1 | A:p
         2 | A:d B:P
         3 | A:d B:P
         4 | A:d B:P
         5 | B:P
         6 | B:p
    """)
    assert story.cuts()[1:] == [
        {"B": (0, 3)},
        {"B": (3, 6)},
        {"B": (6, 9)},
        {"B": (9, 17)},
        {"B": (17, 24)},
    ]
    assert [plan.budget for plan in story.plans] == [20, 4, 4, 4, 20, 20]


class FixedRoom:
    """A step-time model that always allows the same number of prompt tokens."""

    def __init__(self, prompt_tokens: int):
        self.room = prompt_tokens

    def prompt_tokens(self, requests) -> int:
        return self.room

    def learn(self, plan: Plan, done: Committed, seconds: float) -> None:
        pass


def test_short_prompt_does_not_wait_for_a_long_one():
    """B arrives in step 2. Its 6 tokens share the budget of 8 with A, which gets the rest. In order of
    arrival, A would use the whole budget until step 3."""
    story = Story(budget=8, chunk=8)
    story.submit(24, 1, prefix_cache=False)
    story.step()
    story.submit(6, 2, prefix_cache=False)
    assert story.drawn() == timeline("""
         1 | A:P
         2 | A:P B:P
         3 | A:P B:p
         4 | A:p B:d
    """)
    assert story.cuts() == [
        {"A": (0, 8)},
        {"B": (0, 4), "A": (8, 12)},
        {"B": (4, 6), "A": (12, 18)},
        {"A": (18, 24)},
    ]


def test_oldest_prompt_keeps_half_the_budget():
    """A short prompt arrives in every step. The long one still gets 4 of the 8 tokens each time."""
    story = Story(slots=4, budget=8, chunk=8)
    long = story.submit(40, 1, prefix_cache=False)
    while long.finish_reason is None:
        story.submit(5, 1, prefix_cache=False)
        story.step()
    widths = [stop - start for cuts in story.cuts() for start, stop in [cuts["A"]]]
    assert widths == [4] * 10


def test_unneeded_half_is_not_reserved():
    """In step 3, A has 2 tokens left, which is less than half the budget, so B and C get the rest."""
    story = Story(slots=3, budget=8, chunk=8)
    for length in (10, 12, 9):
        story.submit(length, 1, prefix_cache=False)
    story.drawn()
    assert story.cuts() == [
        {"C": (0, 4), "A": (0, 4)},
        {"C": (4, 8), "A": (4, 8)},
        {"C": (8, 9), "A": (8, 10), "B": (0, 5)},
        {"B": (5, 12)},
    ]


def test_next_turn_counts_as_a_short_prompt():
    """Regression: 52 of C's 60 tokens are cached in its slot, but it counted as 60 and was prefilled after
    B's remaining 32."""
    story = Story(slots=2, max_len=200, budget=8, chunk=8)
    said = tuple(range(500, 552))
    story.submit(said, 1)
    story.drawn()
    before = len(story.plans)
    story.submit(40, 1)
    story.step()
    story.submit((*said, *range(600, 608)), 1)
    story.drawn()
    assert story.cuts()[before + 1 : before + 3] == [
        {"C": (52, 56), "B": (8, 12)},
        {"C": (56, 60), "B": (12, 16)},
    ]


@pytest.mark.parametrize("slots", [2, 8])
def test_short_prompt_beside_a_long_one(slots):
    """Regression: with the usual budget, a prompt of 35 tokens next to one of 3,000 had its first token 17
    steps after it arrived."""
    budget = usual_budget(slots, 128)
    story = Story(slots=slots, max_len=4_000, chunk=128, budget=budget)
    story.submit(3_000, 1, prefix_cache=False)
    story.step(), story.step()
    short = story.submit(35, 1, prefix_cache=False)
    story.step(), story.step(), story.step()
    assert short.finish_reason == "length"


def test_prefill_never_starves():
    """However many rows decode, a prompt advances in every step."""
    story = Story(slots=6, budget=4)
    for _ in range(5):
        story.submit(3, 30)
    for _ in range(6):
        story.step()
    late = story.submit(40, 1)
    steps = 0
    while late.finish_reason is None:
        before = late.prefilled
        story.step()
        steps += 1
        assert late.prefilled > before or late.finish_reason
    assert steps == 10  # 40 tokens in chunks of 4


def test_no_step_is_planned_after_the_last_token():
    """Run-ahead knows max_tokens in advance: A has no ghost in step 3, although its last token has not been
    read."""
    story = Story(lag=1)
    story.submit_all((3, 2), (3, 4))
    assert story.drawn() == timeline("""
         1 | A:p B:p
         2 | A:d B:d
         3 | B:d
         4 | B:d
    """)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("when", range(9))
def test_cancel_frees_the_slot_for_the_next_plan(lag, when):
    """B waits for A's slot, the only one. A is cancelled before step `when`, while it is queued, in prefill,
    in decode, or ended."""
    story = Story(slots=1, lag=lag)
    a, b = story.submit(10, 4), story.submit(3, 1)
    for _ in range(when):
        story.step()
    ended = a.finish_reason is not None
    story.sched.finish(a, "cancelled", story.now)
    story.sched.finish(a, "cancelled", story.now)
    check_invariants(story.sched)
    assert a.finish_reason == ("length" if ended else "cancelled")
    story.step()
    assert b.slot == 0
    story.drawn()
    assert b.finish_reason == "length" and len(story.tokens[b.id]) == 1


def test_restart_keeps_the_order_of_arrival():
    """Regression: running requests were put back into the queue after requests that had never been admitted."""
    story = Story(slots=2, chunk=4, budget=4)
    requests = [story.submit((9 * i, *range(i, 20)), 2) for i in range(3)]
    story.step()
    assert list(story.sched.running) == [0, 1] and list(story.sched.waiting) == [2]
    story.sched.start_over()
    assert list(story.sched.waiting.values()) == requests


def test_full_queue_is_refused_with_both_numbers():
    story = Story(slots=1, max_queue=2)
    for _ in range(3):
        story.submit(1, 1)
    with pytest.raises(QueueFull, match=r"2 requests.*max_queue is 2"):
        story.submit(1, 1)
    story.drawn()
    assert story.sched.submitted == 3 and all(len(tokens) == 1 for tokens in story.tokens.values())


@pytest.mark.parametrize(
    ("policy", "idle", "busy"), [("continuous", 4, 3), ("static", 4, 1), ("serial", 2, 1)]
)
def test_queue_limit_ignores_requests_with_a_free_slot(policy, idle, busy):
    """Regression: an idle engine with three slots and a queue of one refused the second of four requests
    that arrived together."""

    def most(story: Story) -> int:
        """Return the number of requests that are accepted before one is refused."""
        for count in range(9):
            try:
                story.submit(1, 5)
            except QueueFull:
                return count
        raise AssertionError("nothing is refused")

    assert most(Story(slots=3, max_queue=1, policy=policy)) == idle
    story = Story(slots=3, max_queue=1, policy=policy)
    story.submit(1, 5)  # two of the three slots are still free
    story.step()
    assert most(story) == busy
    story = Story(slots=3, max_queue=1, policy=policy)
    (
        story.submit(1, 5),
        story.step(),
        story.sched.drain(POLICIES["static" if policy == "serial" else "serial"]),
    )
    assert most(story) == 1  # until the policy has changed, nothing is admitted


def test_request_longer_than_a_slot_is_refused():
    """The message contains both numbers, and the request does not block the queue."""
    story = Story(max_len=20)
    with pytest.raises(ValueError, match=r"15.*6.*21.*20"):
        story.submit(15, 6)
    fits = story.submit(15, 5)
    story.drawn()
    assert fits.finish_reason == "length"


@pytest.mark.parametrize("wrong", [{"slots": 0}, {"max_len": 0}, {"chunk": 0}, {"max_queue": 0}])
def test_a_wrong_setting_is_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Scheduler(**{"slots": 1, "max_len": 1, "policy": POLICIES["continuous"], **wrong})


# --- policies -----------------------------------------------------------------------------------


def test_static_blocks_free_slots():
    """A's slot is blocked in steps 3 and 4, while C and D wait. C's slot is free in step 7, but not blocked,
    because the queue is empty."""
    story = Story(policy="static")
    for tokens in (2, 4, 2, 3):
        story.submit(3, tokens)
    story.drawn()
    assert [plan.blocked for plan in story.plans] == [(), (), (0,), (0,), (), (), ()]


def test_drain_empties_all_slots_first():
    """No request is admitted until all running ones have ended; the new policy starts with empty slots."""
    story = Story(slots=2, chunk=4)
    story.submit_all((9, 2), (9, 4), (9, 1), (9, 1))
    story.step()
    continuous = POLICIES["continuous"]
    serial = POLICIES["serial"]
    story.sched.drain(serial)
    assert (story.sched.policy, story.sched.draining_to) == (continuous, serial)
    while story.sched.running:
        assert (story.sched.policy, story.sched.draining_to) == (continuous, serial)
        story.step()
    assert (story.sched.policy, story.sched.draining_to) == (serial, None)
    assert story.sched.prefixes.rows == [0, 0] and len(story.sched.waiting) == 2
    before = len(story.plans)
    story.drawn()
    assert {plan.policy for plan in story.plans[:before]} == {"continuous"}
    assert {plan.policy for plan in story.plans[before:]} == {"serial"}
    assert not any(plan.admitted for plan in story.plans[1:before])
    assert story.plans[before - 1].blocked == (0,), (
        "A's slot is free, and shut while the engine drains"
    )


def test_idle_drain_ends_at_once():
    """A drain ends immediately when nothing is running. A second drain replaces the first."""
    story = Story()
    continuous = POLICIES["continuous"]
    static = POLICIES["static"]
    story.sched.drain(static)
    assert (story.sched.policy, story.sched.draining_to) == (static, None)
    story.submit(3, 2)
    story.step()
    story.sched.drain(POLICIES["serial"]), story.sched.drain(continuous)
    assert story.sched.draining_to is continuous
    story.drawn()
    assert (story.sched.policy, story.sched.draining_to) == (continuous, None)


def test_unknown_policy_is_refused_with_the_names():
    with pytest.raises(ValueError, match=f"magic.*{', '.join(POLICIES)}"):
        policy_of("magic")


@pytest.mark.parametrize("lag", [0, 1])
def test_custom_policy_gets_only_free_slots(monkeypatch, lag):
    """The greedy policy asks for a hundred slots where there are two; the shy one asks for one, and for -1
    while another request runs."""
    rooms = {
        "greedy": lambda free, running: 100,
        "shy": lambda free, running: -1 if running else 1,
    }
    for policy, room in rooms.items():
        record = POLICIES["continuous"]._replace(name=policy, room=room)
        monkeypatch.setitem(POLICIES, policy, record)
        story = Story(lag=lag, policy=policy)
        requests = [story.submit(5, 3) for _ in range(5)]
        story.drawn()
        assert all(
            request.finish_reason == "length" and request.admission.policy == policy
            for request in requests
        )
        assert max(len(plan.admitted) for plan in story.plans) == (2 if policy == "greedy" else 1)


# --- prefixes -----------------------------------------------------------------------------------


class Read(int):
    """A token that counts how often it is compared or hashed."""

    count = 0

    def __eq__(self, other):
        Read.count += 1
        return int(self) == int(other)

    def __hash__(self):
        Read.count += 1
        return hash(int(self))


def test_planning_is_independent_of_the_prompts_length():
    """A prompt's tokens are read at submit. A plan reads at most one segment after the shared prefix.

    All prompts are equal except for their ends. Comparing 64 prompts of 16,000 tokens in each plan took a
    second under the lock. This test counts Python's function calls.
    """
    short, long = (calls_of_a_plan(tokens) for tokens in (1_000, 8_000))
    assert 0 < long < 2.5 * short  # a binary search takes a few more steps


def calls_of_a_plan(tokens: int) -> float:
    """Return the mean number of function calls per step (plan and commit) while 16 slots serve 32 prompts of
    this length."""
    slots = 16
    planner = Scheduler(slots, tokens + 20, POLICIES["continuous"], chunk=64, budget=64 + 64 * 10)
    opening = list(range(tokens - 2))
    for id in range(2 * slots):
        Read.count = 0
        planner.submit(Request(id, (*map(Read, opening), Read(id)), 20, 0.0))
        assert Read.count <= 3 * tokens
    Read.count = steps = calls = 0

    def count(frame, event, argument) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        while plan := planner.plan(0.0):
            steps += 1
            planner.commit(plan, [[0]] * slots, lambda request, token: None, 0.0)
    finally:
        sys.setprofile(None)
    assert planner.submitted == 2 * slots and not planner.running and not planner.waiting
    assert 0 < Read.count <= 5 * slots * SEGMENT * steps
    return calls / steps


def common(prompt: tuple, other: tuple) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(prompt, other, strict=False)) if a != b),
        min(map(len, (prompt, other))),
    )


@pytest.mark.parametrize("segment", [1, 2, 3, 8])
def test_longest_cached_prefix_is_found(segment):
    """Compare with a token-by-token search through each slot. A prefix shorter than a segment does not count."""
    found = between = 0
    for seed in range(60):
        rng = random.Random(seed)
        slots = rng.randint(1, 5)
        prefixes, held = Prefixes(slots, segment), [()] * slots
        # For each slot: the prompt and its trail
        owners: list[tuple[tuple, Trail]] = [((), Trail())] * slots
        for _ in range(60):
            stem = tuple(rng.choices(range(2), k=rng.randint(1, 30)))
            known = rng.choice([prompt for prompt, _ in owners])
            prompt = known[: rng.randint(0, len(known))] + stem
            trail = prefixes.insert(prompt, 1)
            assert len(trail.nodes) == len(prompt) // segment
            among = rng.sample(range(slots), rng.randint(1, slots))
            rows = {slot: common(prompt[:-1], held[slot]) for slot in among}
            most = max(rows.values())
            first = next(slot for slot in among if rows[slot] == most)
            assert prefixes.match(trail, among) == ((most, first) if most >= segment else (0, None))
            found += most >= segment
            between += most > segment and most % segment > 0
            slot = rng.randrange(slots)
            if rng.random() < 0.6:
                prefixes.forget(slot)
                owners[slot], held[slot] = (prompt, trail), ()
            if rng.random() < 0.7 and owners[slot][0]:  # record more rows of its owner's prompt
                rows = rng.randint(len(held[slot]), len(owners[slot][0]))
                prefixes.record_rows(slot, owners[slot][1], rows)
                held[slot] = owners[slot][0][:rows]
                # Record an answer, too, which ends the request
                if rows == len(owners[slot][0]) and rng.random() < 0.5:
                    answer = tuple(rng.choices(range(2), k=rng.randint(0, 20)))
                    prefixes.record_answer(slot, owners[slot][1], answer, rows + len(answer))
                    held[slot] += answer
                    owners[slot] = (held[slot], prefixes.insert(held[slot], 1))
            if rng.random() < 0.1:
                # The request ends, and the slot keeps its rows
                owners[slot] = (held[slot], prefixes.insert(held[slot], 1))
            if rng.random() < 0.02:
                prefixes.clear()
                held = [()] * slots
            assert prefixes.rows == [len(rows) for rows in held]
    assert found > 500 and (segment == 1 or between > 100)


def test_unshared_prompt_has_no_cached_rows():
    """A prompt without prefix caching finds no rows, not even its own, and no other prompt finds its rows."""
    prefixes, prompt = Prefixes(2, segment=4), tuple(range(20))
    one, none = (prefixes.insert(prompt, shares) for shares in (True, False))
    prefixes.record_rows(0, one, 20)
    prefixes.record_rows(1, none, 20)
    assert [prefixes.match(each, (0, 1)) for each in (one, none)] == [(19, 0), (0, None)]
    assert prefixes.begin_alike(one, [prefixes.insert(prompt, True)], 8)
    assert not any(
        prefixes.begin_alike(each, [other], 8)
        for each, other in ((one, none), (none, one), (none, none))
    )
    assert not prefixes.begin_alike(one, [one], 20), "the last token must be computed"


@pytest.mark.parametrize("answer", [1, 41])
def test_unused_prefixes_are_freed(answer):
    """The nodes of prompts and answers that are in no slot any more are freed."""
    before = nodes()
    planner = Scheduler(2, 200, POLICIES["continuous"], chunk=4)
    for id in range(100):
        planner.submit(Request(id, tuple(range(id, id + 100)), answer, 0.0))
        while plan := planner.plan(0.0):
            planner.commit(plan, [[id]] * 2, lambda request, token: None, 0.0)
        del plan
    assert nodes() - before <= 3 * (25 + answer // 4)


def nodes() -> int:
    """Return the number of nodes in all prefix trees."""
    gc.collect()
    return sum(isinstance(each, Node) for each in gc.get_objects())


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(("said", "taken"), [(2, 5), (5, 8), (8, 11), (9, 12), (21, 24)])
def test_next_turn_continues_in_its_slot(lag, said, taken):
    """A prompt of 4 and an answer of 9 tokens have 12 rows: the 13th token is emitted, but its row is not
    written."""
    story = Story(slots=3, lag=lag)
    first = story.submit(4, 30, eos=said)
    story.submit((900,) * 9, 2)
    story.drawn()
    again = story.submit((*first.prompt, *story.tokens[first.id], 7, 7, 7, 7, 7), 3)
    story.drawn()
    assert (again.slot, again.prefix.cached) == (first.slot, taken)
    assert all(chunk.copied_from is None for plan in story.plans for chunk in plan.chunks)


@pytest.mark.parametrize("lag", [0, 1])
def test_next_turn_copies_from_a_taken_slot(lag):
    """Slot 0 holds A's 9 tokens and 10 of its answer. B reuses them all and takes the slot, and C copies
    the first 17."""
    story = Story(slots=2, lag=lag)
    a = story.submit(9, 11)
    story.drawn()
    said = (*a.prompt, *story.tokens[a.id])
    b = story.submit((*said[:19], 7), 9)
    story.step()
    c = story.submit((*said[:17], 8, 8, 8), 1)
    story.drawn()
    assert (b.slot, b.prefix.cached) == (0, 19) and (c.slot, c.prefix.cached) == (1, 17)
    copies = [
        (chunk.copied_from, chunk.start)
        for plan in story.plans
        for chunk in plan.chunks
        if chunk.copied_from is not None
    ]
    assert copies == [(0, 17)]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("reason", ["cancelled", "error"])
def test_slot_keeps_its_rows_after_a_cancel(lag, reason):
    """All rows from which committed tokens were computed can be reused. Regression: after an error, such as a
    grammar's, the slot forgot them."""
    story = Story(slots=2, lag=lag)
    first = story.submit(9, 30)
    while first.committed < 6:
        story.step()
    story.sched.finish(first, reason, story.now)
    assert story.sched.prefixes.rows == [9 + 5, 0]
    again = story.submit((*first.prompt, *story.tokens[first.id], 7), 1)
    story.drawn()
    assert (again.slot, again.prefix.cached) == (0, 9 + 5)
    scrubs = [scrub for plan in story.plans for scrub in plan.scrubs]
    last = 9 + first.planned + PADDING
    assert scrubs == [(0, 14, last)] * lag


def test_cancelled_prompt_keeps_its_finite_chunks():
    """With run-ahead the newest chunk is in flight. Regression: the same prompt was prefilled from its first
    token again, so a client with a short timeout never got an answer."""
    story = Story(slots=1, lag=1)
    first = story.submit(24, 2)
    for _ in range(3):
        story.step()
    story.sched.finish(first, "cancelled", story.now)
    assert (first.prefilled, story.sched.prefixes.rows) == (12, [8])
    again = story.submit(24, 2)
    story.step()
    assert again.prefix.cached == 8
    assert story.plans[-1].scrubs == ((0, 8, 12 + PADDING),)
    story.drawn()


def test_chunk_in_flight_at_a_cancel_is_kept():
    """If a request is cancelled while a step is being built, two chunks are in flight. Both are read back,
    and the slot keeps them, unless the next prompt has started there."""
    for late in (False, True):
        story = Story(slots=1, lag=1)
        first = story.submit(24, 2)
        story.step()
        story.step()
        plan = story.sched.plan(story.now)
        tokens = story.run(plan)
        story.sched.finish(first, "cancelled", story.now)
        assert story.sched.prefixes.rows == [4]
        if late:
            again = story.submit(24, 2)
            story.step()
            assert again.prefix.cached == 4
        story.launch(plan, tokens)
        if not late:
            again = story.submit(24, 2)
            story.read_all()
            assert story.sched.prefixes.rows == [12]
            story.step()
            assert again.prefix.cached == 12
        check_invariants(story.sched)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("at", [1, 5, 9, 13])
def test_non_finite_chunks_are_not_cached(lag, at):
    """If the row of one token is not finite and the prompt is cancelled, only the chunks before that row are
    cached."""
    story = Story(slots=1, lag=lag)
    first = story.submit((*range(at), BAD, *range(100, 140)), 2)
    for _ in range(5):
        story.step()
    story.sched.finish(first, "cancelled", story.now)
    assert story.sched.prefixes.rows == [at // 4 * 4]
    good = story.submit((*range(at), *range(200, 230)), 2)
    story.drawn()  # asserts that no row that is not finite remains
    assert (good.prefix.cached, good.finish_reason) == (at // 4 * 4, "length")


def test_chunk_does_not_prove_the_chunk_before_it():
    """A key of the last layer that is not finite reaches no later row, so the next chunk may be finite.
    Regression: that chunk proved all rows before it."""
    story = Story(slots=1)
    request = story.submit(24, 2)
    for finite in ([0], [], [0]):
        plan = story.sched.plan(story.now)
        story.sched.prove(plan, finite)
        story.sched.commit(plan, {}, story.accept, story.now)
    assert (request.prefilled, request.proven) == (12, 4)


def test_admission_of_a_request_that_waits_for_the_disk_is_in_a_plan():
    """Regression: no plan listed an admission while all running requests waited for rows from disk."""
    story = Story(slots=2)
    search = SimpleNamespace(is_ready=False, rows=0, own=0)
    story.sched.find_saved = lambda request, least: search
    request = story.submit(8, 1)
    assert story.sched.plan(story.now) is None and request.slot is not None
    search.is_ready = True
    story.drawn()
    assert [plan.admitted for plan in story.plans] == [(request,), ()]


def test_cancel_in_the_queue_keeps_the_cache():
    """Regression: D is admitted to the slot that holds A's rows, and cancelled before its first chunk. The
    slot then forgot A's rows, although D had written nothing."""
    story = Story(slots=3, chunk=4, budget=7)
    first = story.submit(tuple(range(100, 120)), 1)
    story.drawn()
    story.submit(20, 1), story.submit(20, 1)
    third = story.submit(20, 1)
    story.step()
    assert third.slot == first.slot and third.prefilled == 0
    story.sched.finish(third, "cancelled", story.now)
    assert story.sched.prefixes.rows[first.slot] == 20


def test_long_conversation_keeps_its_slot():
    """B shares 8 of the 40 rows in A's slot. These 8 are copied into an empty slot, and A's next turn continues
    in A's slot."""
    story = Story(slots=2)
    a = story.submit(20, 21)
    story.drawn()
    b = story.submit((*range(8), 900, 901), 2)
    story.drawn()
    again = story.submit((*a.prompt, *story.tokens[a.id], 7), 1)
    story.drawn()
    assert (a.slot, b.slot, again.slot) == (0, 1, 0) and (b.prefix.cached, again.prefix.cached) == (
        8,
        40,
    )


def test_few_rows_are_copied_unless_this_step_writes_them():
    """Copying rows that the same step writes takes a second pass, so 20 of them are computed instead, because
    they are less than two segments. Rows that a slot already holds are copied."""
    story = Story(slots=4, chunk=32, budget=96)
    first, other = (story.submit((*range(20), *[n] * 20), 1) for n in (800, 900))
    story.drawn()
    third = story.submit((*range(20), *[700] * 20), 1)
    story.drawn()
    assert (first.prefix.cached, other.prefix.cached, third.prefix.cached) == (0, 0, 20)
    assert len({first.slot, other.slot, third.slot}) == 3
    short = story.submit((*range(15), *[600] * 20), 1)  # shares less than a segment
    story.drawn()
    assert short.prefix.cached == 0


# --- random schedules ---------------------------------------------------------------------------


reused = Counter()  # by seed: answer rows that a next turn reused
left = Counter()  # by seed: rows left by prompts cancelled before their first token
drafted = Counter()  # draft tokens: right (accepted) and wrong (rejected)
overtaken = Counter()  # by policy: how often a request was admitted before an older one


class Fairness:
    """Checks the admissions of a scheduler against the order that each policy guarantees.

    `passed` maps the id of the oldest queued request of each client without a slot to the clients that were
    admitted while it waited.
    """

    def __init__(self, sched: Scheduler):
        self.sched = sched
        self.passed: dict[int, set[str]] = {}
        self._plan = sched.plan
        sched.plan = self.plan

    def plan(self, now: float, prompt_tokens: int) -> Plan | None:
        plan = self._plan(now, prompt_tokens)
        if plan:
            self._look(plan)
        return plan

    def _look(self, plan: Plan) -> None:
        sched = self.sched
        here = {request.id for request in plan.admitted}
        held = Counter(r.client for r in sched.running.values() if r.id not in here)
        line = sorted([*plan.admitted, *sched.waiting.values()], key=lambda request: request.id)
        for request in plan.admitted:
            older = line[: line.index(request)]
            overtaken[plan.policy] += bool(older)
            if plan.policy == "fair":
                self._is_fair(request, line, held)
            elif plan.policy == "short":
                assert all(self._rank(request) < self._rank(other) for other in older)
                assert all(self._rank(request) <= self._rank(other) for other in line)
            else:
                assert not older, "not first come first served"
            line.remove(request)
            held[request.client] += 1

    def _rank(self, request: Request) -> int:
        return len(request.prompt) + request.queued.arrival_step

    def _is_fair(self, request: Request, line: list[Request], held: Counter) -> None:
        oldest = {other.client: other for other in reversed(line)}
        assert oldest.pop(request.client) is request, "not first come first served within a client"
        assert all(held[request.client] <= held[client] for client in oldest)
        passed = {}
        for client, other in oldest.items():
            if not held[client]:
                passed[other.id] = self.passed.get(other.id, set())
                assert request.client not in passed[other.id], "overtaken twice by the same client"
                passed[other.id].add(request.client)
        self.passed = passed


def random_schedule(seed: int) -> int:
    """Run one random schedule, checking the invariants after every step. Return the number of steps."""
    rng = random.Random(seed)
    story = Story(
        slots=rng.randint(1, 5),
        max_len=120,
        lag=rng.randint(0, 1),
        chunk=rng.choice([2, 4, 5, 32]),
        budget=rng.randint(1, 80),
        policy=rng.choice(list(POLICIES)),
        max_queue=rng.randint(1, 6),
        dice=rng if rng.random() < 0.5 else None,
    )
    story.step_time = FixedRoom(rng.choice([1, 8, 2**63]))
    Fairness(story.sched)
    requests: list[Request] = []
    run = story.run

    def run_and_cancel(plan: Plan) -> dict[int, list[int]]:
        """Run a step, during which another thread may cancel a request."""
        tokens = run(plan)
        if requests and rng.random() < 0.05:
            story.sched.finish(rng.choice(requests), "cancelled", story.now)
        return tokens

    story.run = run_and_cancel
    clients = "abcdef"[: rng.randint(1, 6)]
    refused = 0
    # Waves: each starts after all requests of the previous one have ended
    for _ in range(rng.choice([1, 1, 3])):
        for _ in range(rng.randint(1, 12)):
            for _ in range(rng.choice([0, 0, 1, 3])):
                prompt, tokens = rng.randint(1, rng.choice([20, 100])), rng.randint(1, 12)
                # The next turn of a conversation
                if rng.random() < 0.6 and (ended := [r for r in requests if r.finish_reason]):
                    earlier = rng.choice(ended[-3:])
                    said = (*earlier.prompt, *story.tokens[earlier.id])
                    kept = len(said) if rng.random() < 0.8 else rng.randint(0, len(said))
                    prompt = (*said[:kept], *range(rng.randint(1, 9)))[:100]
                elif rng.random() < 0.1:
                    prompt = (*range(rng.randint(0, 60)), BAD, *range(rng.randint(0, 20)))
                try:
                    eos = rng.choice([None, rng.randint(1, tokens)])
                    shares = rng.random() < 0.8
                    client = rng.choice(clients)
                    requests.append(story.submit(prompt, tokens, eos, shares, client))
                except QueueFull:
                    refused += 1
                    assert len(story.sched.waiting) >= story.sched.max_queue
            if rng.random() < 0.05:
                story.sched.drain(rng.choice(list(POLICIES.values())))
            if requests and rng.random() < 0.2:
                story.sched.finish(rng.choice(requests), "cancelled", story.now)
            story.step()
        while story.step():
            assert story.now < 6_000, "somebody starves"
    for request in requests:
        said, expected = (
            len(story.tokens[request.id]),
            story.eos.get(request.id, request.max_tokens),
        )
        if request.finish_reason == "cancelled":
            assert said <= expected
            left[seed] += request.proven * (said == 0)
        elif BAD in request.prompt:
            assert (said, request.finish_reason) == (0, "error")
        else:
            assert said == request.committed == expected
            assert request.finish_reason == ("stop" if request.id in story.eos else "length")
        assert request.end is not None
    assert story.sched.submitted == len(requests) and len(story.sched.free) == story.sched.slots
    drafted["right"] += sum(request.drafting.accepted for request in requests)
    drafted["wrong"] += sum(
        request.drafting.proposed - request.drafting.accepted for request in requests
    )
    reused[seed] = sum(token >= 1_000 for r in requests for token in r.prompt[: r.prefix.cached])
    return story.sched.steps


def test_random_schedules():
    reused.clear(), overtaken.clear(), drafted.clear(), left.clear()
    steps = sum(random_schedule(seed) for seed in range(SCHEDULES))
    print(
        f"{SCHEDULES:,} schedules, {steps:,} steps, {reused.total():,} rows of answers reused, "
        f"{left.total():,} rows of cancelled prompts kept, "
        f"overtaken: {dict(overtaken)}, drafted: {dict(drafted)}",
        file=sys.stderr,
    )
    assert steps > 5 * SCHEDULES and 2 * reused.total() > SCHEDULES
    assert left.total() > SCHEDULES
    assert min(drafted["right"], drafted["wrong"]) > SCHEDULES
    assert min(overtaken["fair"], overtaken["short"]) > SCHEDULES / 8


# --- planted bugs -------------------------------------------------------------------------------


def no_turns(scheduler: Scheduler) -> Iterator[Request]:
    """Yield requests of the client with the fewest slots, regardless of when it was last served."""
    held = Counter(request.client for request in scheduler.running.values())
    line = list(scheduler.waiting.values())
    while line:
        request = min(line, key=lambda r: held[r.client])
        line.remove(request)
        held[request.client] += 1
        yield request


def no_slots(scheduler: Scheduler) -> Iterator[Request]:
    """Yield requests of the client that was served longest ago, regardless of its number of slots."""
    line = list(scheduler.waiting.values())
    while line:
        request = min(line, key=lambda r: max(r.queued.arrival_step, r.queued.fairness_turn))
        line.remove(request)
        for other in line:
            if other.client == request.client:
                other.queued.fairness_turn = scheduler.steps + 1
        yield request


def no_age(scheduler: Scheduler) -> Iterator[Request]:
    return iter(sorted(scheduler.waiting.values(), key=lambda r: len(r.prompt)))


def freed_twice(finish: Callable) -> Callable:
    def planted(self, request, reason, now):
        finish(self, request, reason, now)
        if request.slot is not None:
            self.prefixes.by_use.append(request.slot)

    return planted


def two_owners(admit: Callable) -> Callable:
    def planted(self, now):
        admitted = admit(self, now)
        for request in admitted:
            request.admission = request.admission._replace(slot=0)
        return admitted

    return planted


def newest_first(submit: Callable) -> Callable:
    def planted(self, request):
        submit(self, request)
        self.waiting.move_to_end(request.id, last=False)

    return planted


def token_to_the_new_owner(commit: Callable) -> Callable:
    def planted(self, plan, tokens, accept, now):
        owners = {request.slot: request for request in self.running.values()}
        for member in plan.emitters:
            if member.request.finish_reason and member.slot in owners:
                accept(owners[member.slot], tokens[member.slot][0])
        return commit(self, plan, tokens, accept, now)

    return planted


def wrong_draft_taken(commit: Callable) -> Callable:
    def planted(self, plan, tokens, accept, now):
        decodes = [d._replace(draft=tuple(tokens[d.slot][:-1])) for d in plan.decodes]
        return commit(self, replace(plan, decodes=tuple(decodes)), tokens, accept, now)

    return planted


def unseen_chunk_cached(leave: Callable) -> Callable:
    def planted(self, request):
        request.proven = max(request.proven, request.prefilled)
        leave(self, request)

    return planted


def last_row_cached(is_ghosts: bool, leave: Callable) -> Callable:
    """Cache the newest token's row, which is not written, or a ghost's, which must be scrubbed."""

    def planted(self, request):
        leave(self, request)
        is_ghost = request.planned > request.committed
        if request.prefix_cache and request.answer and is_ghost == is_ghosts:
            whole = (*request.prompt, *request.answer)
            self.prefixes.record_rows(request.slot, self.prefixes.insert(whole, True), len(whole))

    return planted


BUGS = {
    "a slot is freed twice": (Scheduler, "finish", freed_twice),
    "a slot has two owners": (Scheduler, "_admit", two_owners),
    "the newest is served first": (Scheduler, "submit", newest_first),
    "a ghost's token goes to the slot's new owner": (Scheduler, "commit", token_to_the_new_owner),
    "the newest token is cached": (Scheduler, "_keep_proven_rows", partial(last_row_cached, False)),
    "a ghost's row is cached": (Scheduler, "_keep_proven_rows", partial(last_row_cached, True)),
    "a token after a wrong draft is taken": (Scheduler, "commit", wrong_draft_taken),
    "an unproven chunk is cached": (Scheduler, "_keep_proven_rows", unseen_chunk_cached),
    "a chunk of an earlier owner is cached": (
        Prefixes,
        "is_held_by",
        lambda held: lambda *slot_and_trail: True,
    ),
}
UNFAIR = {"fair": [no_turns, no_slots], "short": [no_age]}


def schedules_fail() -> bool:
    try:
        for seed in range(200):
            random_schedule(seed)
    except (AssertionError, KeyError, ValueError, IndexError):
        return True
    return False


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(monkeypatch, bug):
    """The invariants catch each bug in random schedules."""
    owner, name, plant = BUGS[bug]
    monkeypatch.setattr(owner, name, plant(getattr(owner, name)))
    assert schedules_fail()


@pytest.mark.parametrize("policy, order", [(p, order) for p in UNFAIR for order in UNFAIR[p]])
def test_a_planted_unfairness_is_caught(monkeypatch, policy, order):
    monkeypatch.setitem(POLICIES, policy, POLICIES[policy]._replace(next=order))
    assert schedules_fail()
