"""Stage 6: slots, and continuous batching. You write `next_row` in request.py, and `plan`, `commit`,
`finish` and `_keep_proven_rows` in sched.py."""

import random

import pytest
from scheduler_story import Story, name

from course.from_zero.shared_by_tests import ANSWERS, SEED, Tale, new_engine, steps_for
from policies import POLICIES
from request import Request


@pytest.mark.about("next_row")
def test_next_row():
    """The newest token goes into the row after all tokens before it."""
    request = Request(1, (5, 6, 7), 10, 0.0)
    rows = []
    for request.planned in (1, 2, 9):
        rows.append(request.next_row)
    assert rows == [3, 4, 11]


@pytest.mark.about("plan", "commit", "finish")
def test_continuous_batching():
    """The steps are those of the timeline at the top of sched.py."""
    tale = Tale(slots=2)
    tale.submit_all((3, 3), (3, 5), (3, 2))
    tale.should_be("""
         1 | A:p B:p
         2 | A:d B:d
         3 | A:d B:d
         4 | B:d C:p
         5 | B:d C:d
    """)
    print("\n".join(tale.lines()))


@pytest.mark.about("commit", "plan")
def test_ends():
    """Answers end at an end token or at max_tokens, even after one token."""
    tale = Tale(slots=3, budget=20)
    stops = tale.submit(3, 9, eos=2)
    full = [tale.submit(2, 1), tale.submit(4, 3, eos=3), tale.submit(1, 2)]
    tale.should_be("""
         1 | A:p B:p C:p
         2 | A:d C:d D:p
         3 | C:d D:d
    """)
    assert stops.finish_reason == "stop"
    # C's last possible token is an end token, too
    assert [request.finish_reason for request in full] == ["length", "stop", "length"]
    assert None not in [request.end for request in (stops, *full)]


@pytest.mark.about("plan")
def test_plan():
    """A plan lists the admitted requests and the blocked slots, and counts the waiting requests."""
    tale = Tale(slots=2, policy="serial")
    tale.submit_all((3, 2), (3, 2), (3, 2))
    plan = tale.sched.plan(now=4.0)
    assert (plan.step, plan.at, plan.policy) == (1, 4.0, "serial")
    assert [name(request) for request in plan.admitted] == ["A"]
    assert plan.blocked == (1,)
    assert plan.waiting == 2


@pytest.mark.about("plan")
def test_room():
    """One whole chunk always fits, unless it would take too long for the requests that decode."""
    for prompt_tokens, tokens in ((2**63, 3), (2, 2)):
        tale = Tale(slots=4, chunk=3, budget=2)
        tale.submit_all((1, 4), (1, 4), (1, 4))
        tale.step()
        tale.submit(5, 2)
        plan = tale.sched.plan(1.0, prompt_tokens)
        assert [chunk.tokens for chunk in plan.chunks] == [tokens]
        assert plan.budget == 3 + tokens


@pytest.mark.about("plan")
def test_held():
    """A request in prefill without a chunk is held."""
    tale = Tale(slots=3, chunk=4, budget=4)
    tale.submit_all((2, 2), (2, 2), (3, 2))
    plan = tale.sched.plan(0.0)
    assert [name(request) for request in plan.held] == ["C"]
    assert len(plan.admitted) == 3


@pytest.mark.about("plan")
def test_nobody():
    """Without requests no step is planned, and no slot is blocked unless a request waits."""
    tale = Tale(slots=2, policy="serial")
    assert tale.sched.plan(0.0) is None
    tale.submit(3, 2)
    assert tale.sched.plan(0.0).blocked == ()


@pytest.mark.about("plan")
def test_max_tokens():
    """No more than `max_tokens` tokens are planned, even if none has been read."""
    tale = Tale(slots=1)
    request = tale.submit(3, 2)
    plans = [tale.sched.plan(0.0) for _ in range(3)]
    assert [plan is None for plan in plans] == [False, False, True]
    assert request.planned == 2


@pytest.mark.about("commit")
def test_commit():
    """A commit hands out tokens, and reports which requests have ended, now or before."""
    tale = Tale(slots=3)
    first = tale.submit(3, 1)
    second = tale.submit(3, 5)
    plan = tale.sched.plan(0.0)
    done = tale.sched.commit(plan, tale.run(plan), tale.accept, now=7.0)
    assert ([*done.ended], [*done.ghosts]) == ([first], [])
    assert [len(first.answer), len(second.answer)] == [1, 1]
    assert first.end.at == 7.0
    assert tale.sched.free == [2, 0], "the slot that was freed last is the last to be taken"
    plan = tale.sched.plan(8.0)
    tale.sched.finish(second, "cancelled", 9.0)
    done = tale.sched.commit(plan, tale.run(plan), tale.accept, now=9.0)
    assert ([*done.ended], [*done.ghosts]) == ([], [second.slot])
    assert len(second.answer) == 1


@pytest.mark.about("finish")
def test_cancel():
    """A cancelled request leaves the queue, or its slot."""
    tale = Tale(slots=1)
    first, second, third = [tale.submit(3, 5) for _ in range(3)]
    tale.step()
    tale.sched.finish(second, "cancelled", 1.0)
    tale.sched.finish(second, "error", 2.0)  # ending it again changes nothing
    tale.sched.finish(first, "cancelled", 2.0)
    assert second.end == ("cancelled", 1.0)
    assert first.end == ("cancelled", 2.0)
    assert [*tale.sched.waiting] == [third.id]
    tale.should_be("""
         1 | A:p
         2 | C:p
         3 | C:d
         4 | C:d
         5 | C:d
         6 | C:d
    """)


@pytest.mark.about("finish")
def test_drain():
    """When the last request has left, a pending change of policy takes effect (`_end_drain`)."""
    tale = Tale(slots=2)
    request = tale.submit(3, 5)
    tale.step()
    tale.sched.drain(POLICIES["static"])
    tale.sched.finish(request, "cancelled", 1.0)
    assert tale.sched.policy.name == "static"


@pytest.mark.about("_keep_proven_rows", "plan")
def test_scrub():
    """Rows that may hold NaN are zeroed before the next owner reads them."""
    tale = Tale(slots=1, chunk=4)
    failing = tale.submit(6, 4)
    tale.fails.add(failing.id)
    tale.submit(3, 3)
    tale.should_be("""
         1 | A:P
         2 | A:p
         3 | B:p
         4 | B:d
         5 | B:d
    """)
    assert (failing.finish_reason, failing.answer) == ("error", [])


@pytest.mark.about("_keep_proven_rows", "plan")
def test_scrub_in_mid_prompt():
    """Rows are also zeroed after a cancel, if no token has shown yet that they are finite."""
    tale = Tale(slots=1, chunk=4)
    request = Story.submit(tale, 9, 4)
    tale.fails.add(request.id)
    tale.step()
    tale.sched.finish(request, "cancelled", 1.0)
    assert tale.sched.prefixes.rows == [0], "the slot still remembers rows of a prompt"
    tale.submit(2, 2)
    tale.should_be("""
         1 | A:P
         2 | B:p
         3 | B:d
    """)


def test_random():
    """With requests at random times, every plan keeps every invariant."""
    for seed in range(25):
        dice = random.Random(f"{SEED}{seed}" if SEED else seed)
        tale = Tale(dice.randint(1, 4), chunk=dice.choice((2, 4, 8)), budget=dice.randint(1, 20))
        requests = []
        while len(requests) < 12 or tale.sched.running or tale.sched.waiting:
            if len(requests) < 12 and dice.random() < 0.5:
                eos = dice.choice((None, dice.randint(1, 9)))
                requests.append(tale.submit(dice.randint(1, 20), dice.randint(1, 9), eos=eos))
                if dice.random() < 0.15:
                    tale.fails.add(requests[-1].id)
            if requests and dice.random() < 0.1:
                tale.sched.finish(dice.choice(requests), "cancelled", tale.now)
            tale.step()
            assert len(tale.plans) < 300, f"seed {seed}: requests still run or wait"


def test_fewer_steps():
    """Six prompts in two slots get the same answers in fewer steps."""
    with new_engine(slots=2, policy="static", run_ahead=False) as engine:
        batches = steps_for(engine, ANSWERS)
    with new_engine(slots=2, run_ahead=False) as engine:
        steps = steps_for(engine, ANSWERS)
    assert steps < batches
    print(
        f"six prompts: {batches} steps in batches of two, {steps} if a free slot is taken at once"
    )
