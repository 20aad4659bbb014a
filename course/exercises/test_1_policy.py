"""Exercise 1: a policy.

    python -m pytest -x course/exercises/test_1_policy.py

The task. Under `continuous`, requests that arrive together are admitted together, as many as there
are free slots. The steps that read their prompts are long, and all that decode beside them wait.
Write the policy `gentle`: whenever a slot is free the next in line takes it, but at most one
newcomer a step. Three slots, four prompts of one chunk, three tokens for each (d is a decode; p is
a chunk that ends its prompt, where the essay of `sched.py` writes P for all chunks):

    1 | A:p
    2 | A:d B:p
    3 | A:d B:d C:p
    4 | B:d C:d D:p        A has ended, and D takes its slot
    5 | C:d D:d
    6 | D:d

Read first: the essay at the top of `sched.py`, then `Scheduler._admit` and `policies.py`. Rung 4 of
the ladder (`course/ladder/4_continuous.py`) has a scheduler that is smaller still.

Where: `policies.py`, one record in `TABLE`, with a name, a sentence for people, and two answers: how
many may come in now, and who is next. No other file knows what a policy does.

How to know: the command above, and `python -m pytest tests/core/test_sched.py`. In the screen, `p`
shows the new name.
"""

from scheduler_story import Story
from short_failures import not_done

from policies import POLICIES

TIMELINE = [line.strip().partition("        ")[0] for line in __doc__.splitlines() if " | " in line]


def story() -> Story:
    if "gentle" not in POLICIES:
        not_done("policies.py has no policy 'gentle': add a record to TABLE")
    says = POLICIES["gentle"].does
    if not isinstance(says, str) or len(says.split()) < 4 or not says.endswith("."):
        not_done(
            f"the policy's `does` is {says!r}, and should be a sentence for people, as others have"
        )
    return Story(slots=3, policy="gentle")


def test_gentle_admits_one_newcomer_a_step():
    """Four prompts that come at once: the timeline at the top of this file, step by step."""
    gentle = story()
    for _ in range(4):
        gentle.submit(4, 3, prefix_cache=False)
    assert [" ".join(line.split()) for line in gentle.drawn()] == TIMELINE


def test_gentle_fills_a_free_slot_in_mid_answer():
    """It is no kind of `serial`: B comes while A decodes."""
    gentle = story()
    gentle.submit(4, 20, prefix_cache=False)
    assert gentle.step() and gentle.step()
    gentle.submit(4, 5, prefix_cache=False)
    assert gentle.step() and len(gentle.sched.running) == 2
    room = POLICIES["gentle"].room
    assert [room(0, 3), room(1, 2), room(3, 0)] == [0, 1, 1], "room: never more than there is"


def test_the_other_policies_are_as_before():
    story()
    usual = {"continuous": 3, "static": 3, "serial": 1, "fair": 3, "short": 3}
    for policy, admitted in usual.items():
        other = Story(slots=3, policy=policy)
        for _ in range(4):
            other.submit(4, 3, prefix_cache=False)
        assert other.step() and len(other.plans[0].admitted) == admitted, policy
