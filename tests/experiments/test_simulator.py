"""The scheduler without a model: requests that arrive and leave, and runs that cannot be replayed to the end.

Other tests show that a replay has the steps of its run: `tests/experiments/test_policy_race.py`,
`tests/screen/test_recording.py`, `tests/web/test_real.py`.
"""

import math

import pytest

from experiments.simulator import Guest, Replay, Stuck
from policies import POLICIES
from request import Request

CONTINUOUS = POLICIES["continuous"]
OLD = {"slots": 2, "max_len": 100, "chunk": 8, "budget": 10, "max_queue": 1}


def guests(*lives: tuple[int, float], arrived: float = 0.0) -> list[Guest]:
    """Return requests with prompts of four tokens, each with the length of its answer, or the time at which
    it is cancelled."""
    found = []
    for id, (tokens, left) in enumerate(lives, start=1):
        found.append(Guest(Request(id, (id,) * 4, 50, arrived), tokens, left))
    return found


def timeline(replay: Replay) -> list[str]:
    """Return for each step its time, and the requests that prefill and decode."""
    lines = []
    for plan, began, ended, ghosts, _ in replay:
        chunks = [f"{chunk.request.id}:p" for chunk in plan.chunks]
        decodes = [f"{decode.request.id}:d" for decode in plan.decodes]
        ghost = f" ghosts {[*ghosts]}" if ghosts else ""
        lines.append(f"{began:.0f}-{ended:.0f} | {' '.join([*chunks, *decodes])}{ghost}")
    return lines


def test_run_ahead_sees_an_end_a_step_late():
    """As in the engine, a ghost runs in the step that was planned too early. With `eager_first_token`, a first
    token is read before the next step is planned."""

    def played(**options) -> list[str]:
        both = guests((1, math.inf), (2, math.inf))
        return timeline(Replay.under(OLD | options, CONTINUOUS, both, lambda plan: 2.0))

    assert played() == ["0-2 | 1:p 2:p", "2-4 | 1:d 2:d ghosts [0]", "4-6 | 2:d ghosts [1]"]
    assert played(eager_first_token=True) == ["0-2 | 1:p 2:p", "2-4 | 2:d", "4-6 | 2:d ghosts [1]"]


def test_replay_drafts_the_same_tokens():
    """Regression: recorded answers had several tokens a step, but the replay took a step for each token. The
    previous step is read before a draft."""
    (guest,) = guests((9, math.inf))
    guest = guest._replace(drafts=[(0, 0), (3, 2), (2, 0), (9, 2)])
    played = list(Replay.under(OLD, CONTINUOUS, [guest], lambda plan: 1.0))
    assert [step.drafts for step in played] == [(), (), ((0, 3, 2),), ((0, 2, 0),), ((0, 9, 2),)]
    assert guest.request.committed == 9 and guest.request.drafting.accepted == 4


def test_limits_of_an_old_recording():
    """Old recordings contain `far`, a row from which tokens counted more against the budget. It is ignored."""

    def cuts(**more) -> list[int]:
        limits = OLD | {"chunk": 32, "budget": 8} | more
        long = Guest(Request(1, (0,) * 70, 1, 0.0), 1)
        played = Replay.under(limits, POLICIES["serial"], [long], lambda plan: 1.0)
        return [chunk.tokens for step in played for chunk in step.plan.chunks]

    assert cuts() == cuts(far=8, eager_first_token=False) == [32, 32, 6]


def test_replay_refuses_no_request():
    """Regression: under another policy the queue may exceed the engine's limit. A comparison failed with a
    traceback."""
    crowd = guests(*[(3, math.inf)] * 9)
    played = list(Replay.under(OLD, POLICIES["serial"], crowd, lambda plan: 1.0))
    assert max(step.plan.waiting for step in played) == 8
    assert all(guest.request.finish_reason == "stop" for guest in crowd)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_replayed_cancel_leaves_at_the_same_moment(run_ahead):
    """Regression: the replay stopped planning after the last step, and a cancelled request kept its slot."""
    crowd = guests((math.inf, 4.5), arrived=1.0)
    options = {"run_ahead": run_ahead}
    played = list(Replay.under(OLD, POLICIES["fair"], crowd, lambda plan: 1.0, **options))
    assert [step.ended for step in played][:4] == [2.0, 3.0, 4.0, 5.0]
    assert crowd[0].request.finish_reason == "cancelled"
    assert crowd[0].request.committed == 4


def test_stuck_replay_is_an_error():
    shut = POLICIES["serial"]._replace(room=lambda free, running: 0)
    with pytest.raises(Stuck, match="no slots are taken, 2 wait"):
        list(Replay.under(OLD, shut, guests((1, math.inf), (1, math.inf)), lambda plan: 1.0))
