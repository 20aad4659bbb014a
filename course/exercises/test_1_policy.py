"""Exercise 1: a policy.

    python -m pytest -x course/exercises/test_1_policy.py

The task. Under `continuous`, requests that arrive together are admitted together, as many as there
are free slots. The steps that prefill their prompts are long, and every request that decodes has to
wait for them. Also, a client with many long prompts can take all slots: `fair` counts slots, but
not what is in them. Write the policy `gentle`. If a slot is free, it admits one request per step: a
request of the client whose running requests have the fewest tokens in their prompts. If several
clients have the fewest, it takes the first request in line. In the example there are three slots. A
and B are client X's requests, C and D client Y's. A's prompt has 4 tokens, the others have 2, and
each answer has 3. (d is a decode, and p is the chunk that ends a prompt, as in the essay of
`sched.py`.)

    1 | A:p
    2 | A:d C:p            Y has no tokens in a slot, and X has 4
    3 | A:d C:d D:p        Y has 2
    4 | B:p C:d D:d        A has ended: X has none
    5 | B:d D:d
    6 | B:d

Read first: the essay at the top of `sched.py`, then `Scheduler._admit` and `policies.py`, where
`by_turns` is the closest example. (The Virtual Token Counter counts tokens in a similar way: Sheng
et al., "Fairness in serving large language models", 2024.)

Where: in `policies.py`, a function and one record in `TABLE`, with a name, a sentence for users,
and two answers: how many requests may be admitted now, and which request is next. No other file
knows what a policy does.

How to check: run the command above and `python -m pytest tests/core/test_sched.py`. On the screen,
`p` shows the new name.
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
            f"the policy's `does` is {says!r}, but should be a sentence for people, like the others"
        )
    return Story(slots=3, policy="gentle")


def test_gentle_admits_one_newcomer_a_step():
    """Four prompts of two clients follow the timeline at the top of this file."""
    gentle = story()
    for prompt, client in ((4, "X"), (2, "X"), (2, "Y"), (2, "Y")):
        gentle.submit(prompt, 3, prefix_cache=False, client=client)
    assert [" ".join(line.split()) for line in gentle.drawn()] == TIMELINE


def test_gentle_counts_tokens():
    """Y has more requests in slots than X, but fewer tokens."""
    gentle = story()
    for prompt, client in ((4, "X"), (1, "Y"), (1, "Y"), (2, "X"), (2, "Y")):
        gentle.submit(prompt, 9 if prompt < 4 else 20, prefix_cache=False, client=client)
    while len(gentle.sched.waiting) > 1:
        assert gentle.step()
    assert [request.client for request in gentle.sched.waiting.values()] == ["X"]


def test_gentle_fills_a_free_slot_in_mid_answer():
    """The policy differs from `serial`: B is admitted while A decodes."""
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
