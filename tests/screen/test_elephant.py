"""The budget that is turned while the engine runs, and the elephant that shows what it trades."""

import pytest
from stage import Stage, show

from sched import NARROWEST
from screen import state as state_
from screen.room import WIDEST, bounds


def costs(stage: Stage, first: int) -> list[int]:
    """What each step from this one on has cost, if it reads a prompt."""
    steps = [column.view for column in stage.state.history if column.step >= first]
    return [step.cost for step in steps if step.prefill]


@pytest.mark.parametrize("budget", [24, 40, 100])
def test_a_budget_that_is_turned_while_prompts_are_read_bounds_each_step_from_then_on(budget):
    stage = Stage().load()
    stage.session.obey("/burst 8")
    stage.turns(2)
    stage.session.obey(f"/budget {budget}")
    stage.turns(1)
    first = stage.state.view.turns[-1][0]
    for i in range(12):
        stage.session.obey("x" * 300 + str(i))
    stage.finish()
    after = costs(stage, first)
    assert len(after) > 10 and budget - 8 <= max(after) <= budget
    assert stage.state.view.engine.limits.budget == budget
    stage.session.obey("/budget off")
    stage.turns()
    assert stage.state.view.engine.limits == stage.state.view.made_with


def test_a_budget_without_room_for_a_chunk_or_beyond_a_slot_is_refused_with_the_limits():
    stage = Stage().load()
    least, most = bounds(stage.state.view.made_with)
    assert (least, most) == (8 + NARROWEST, 8 + WIDEST * 16)
    for wrong in (least - 1, most + 1):
        with pytest.raises(ValueError, match=rf"budget = {wrong}, .* {least} to {most}: a row"):
            stage.session.obey(f"/budget {wrong}")
    for right in (least, most):
        stage.session.obey(f"/budget {right}")
    with pytest.raises(ValueError, match="budget = 'many'"):
        stage.session.obey("/budget many")


def test_the_keys_halve_and_double_the_chunk_and_lead_back_to_the_engines_own_budget():
    async def scenario(it):
        engine = it.stage.engine
        engine.sched.chunk, engine.sched.budget = 64, 104
        await it.turns()
        seen = []
        keys = ["left_square_bracket"] * 4 + ["right_square_bracket"] * 7
        for key in keys:
            await it.press(key)
            seen.append((engine.sched.budget, engine.sched.chunk))
        assert seen[:4] == [(40, 32), (24, 16), (24, 16), (24, 16)]
        assert seen[4:] == [(40, 32), (104, 64), (136, 128), (264, 256), *[(520, 512)] * 3]
        assert "budget 520" in it.text().splitlines()[0]
        await it.press("left_square_bracket", "left_square_bracket", "left_square_bracket")
        assert engine.sched.budget == 104 and "budget" not in it.text().splitlines()[0]

    show(scenario, size=(200, 50))


def turned_run(turn: str) -> Stage:
    """A run in whose middle the budget is turned, or before it."""
    stage = Stage().load()
    if turn == "before":
        stage.session.obey("/budget 130")
        stage.turns()
    stage.session.obey("/burst 20")
    stage.turns(30)
    if turn == "meanwhile":
        stage.session.obey("/budget 130")
    return stage.finish()


def test_a_run_in_which_the_budget_was_turned_is_not_replayed_and_says_so():
    stage = turned_run("meanwhile")
    step = stage.state.view.turns[-1][0]
    words = f"the budget was turned to 130 in step {step:,}, and a replay has one"
    with pytest.raises(ValueError, match=words):
        stage.session.obey("/compare")
    stage.session.obey("/why p95")
    assert stage.state.replayed[1] == words


def test_a_run_is_replayed_with_the_budget_that_it_had_and_not_with_the_one_of_now():
    """With today's limits the replay had other steps than what ran."""
    replays = {}
    for turn in ("before", "never"):
        stage = turned_run(turn)
        for now in ("/budget 60", "/budget off"):
            stage.session.obey(now)
            stage.turns()
            compared = 0
            for request in list(stage.state.ended):
                stage.state.look_into(request)
                found = {each.name: each.steps for each in stage.state.replayed[1]}
                assert found["measured"] == found["continuous"]
                compared += 1
            assert compared == 20
            replays[turn, now] = len(state_.compare(stage.state).runs[0].columns)
        assert len({steps for (each, _), steps in replays.items() if each == turn}) == 1
        assert replays[turn, "/budget off"] == len(stage.state.history)
    assert replays["before", "/budget off"] != replays["never", "/budget off"]


def test_a_race_and_clients_keep_their_budget():
    stage = Stage().load()
    stage.session.obey("/race 8")
    stage.turns(5)
    stage.session.obey("/budget 100")
    stage.turns()
    assert "its legs have one budget" in stage.state.faults[-1].message
    assert not stage.state.view.turns
    view = stage.state.view
    for others in (view._replace(watches=True), view._replace(door=object())):
        stage.state.view = others
        with pytest.raises(ValueError, match=r"no other budget .* clients would suffer"):
            stage.session.obey("/budget 100")
