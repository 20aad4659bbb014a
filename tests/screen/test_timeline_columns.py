"""Steps as columns, and what is counted from them: ghosts, ends before the cursor, the cost of a row."""

import pytest
from screen_stage import Stage

from engine.snapshot import StepView
from screen.busy_period_stats import Period
from screen.draw import charts
from screen.timeline_columns import column


def step(number: int, decode=(), ghosts=(), tokens: int = 0, **more) -> StepView:
    members = dict.fromkeys(("admitted", "why", "prefill", "held", "blocked"), ()) | more
    times = dict.fromkeys(("plan_s", "build_s", "device_s", "wait_s", "commit_s"), 0.0)
    return StepView(
        number,
        **members,
        decode=decode,
        ghosts=ghosts,
        waiting=0,
        policy="continuous",
        tokens=tokens,
        budget=32,
        began=float(number),
        ended=number + 1.0,
        **times,
    )


def test_a_ghost_fills_no_row():
    """Regression: when the user went back in time, a slot showed one row more than its request ever had."""
    first = column(step(1, prefill=((0, 7, 0, 20),), admitted=((0, 7),)), slots=2)
    second = column(step(2, decode=((0, 7),), tokens=1), 2, first)
    ghost = column(step(3, decode=((0, 7),), ghosts=(0,)), 2, second)
    assert [each.rows[0] for each in (first, second, ghost)] == [20, 21, 21]
    assert (second.useful, ghost.useful) == (1, 0)


def test_a_ghost_is_no_gap_between_two_tokens():
    """Regression: the 95th percentile of a period's gaps included tokens that no client had received."""
    period = Period(0.0)
    for each in (step(1), step(2, ((0, 7), (1, 8)), (1,), 1), step(3, ((0, 7),), (), 1)):
        period.take_step(column(each, slots=2))
    assert list(period.gaps) == [1.0, 1.0]


def test_back_in_time_only_earlier_ends_count():
    stage = Stage(slots=2, prompts=[("hello", 5), ("you", 10), ("there", 20)]).load()
    stage.obey("/burst 3")
    stage.finish()
    state = stage.state
    assert state.finished == 3
    state.look_at(state.index_of(1))
    assert state.finished == 0
    for i, each in enumerate(state.history):
        state.look_at(i)
        assert state.finished == sum(request.ended <= each.ended for request in state.ended)


def test_after_the_last_slot_the_first_is_selected():
    state = Stage(slots=3).load().state
    for slot, selected in ((2, 2), (3, 0), (-1, 2), (7, 1)):
        state.select(slot)
        assert state.selected == selected


@pytest.mark.parametrize(
    ("costs", "runs", "words"),
    [
        ({}, False, "No step has only decoded so far: fire a burst (b), and one prompt alone"),
        ({}, True, "No step has only decoded so far: wait until some have ended"),
        ({4: 0.01}, False, "All steps had 4 rows so far: fire a burst"),
        ({1: 0.01, 8: 0.009, 4: 0.5}, False, "Too noisy to say: 8 rows took less time than 1 row."),
        ({4: 0.5, 2: 0.01, 8: 0.02}, True, "8 rows cost 2.00 × as much as 2 rows, and yield 2.00"),
    ],
)
def test_the_cost_of_a_row_in_words(costs, runs, words):
    assert charts.lesson(costs, runs).startswith(words)
