"""The budget that can be changed while the engine runs, and the long prompt that shows its trade-off."""

import pytest
from rich.cells import cell_len
from screen_stage import Stage, drawn, like_golden, on_screen, plain

from engine.snapshot import NARROWEST, WIDEST
from experiments import long_prompt, race
from screen.draw.style import span
from screen.pages import busy_periods


def test_a_changed_budget_bounds_the_next_steps(stage):
    stage.obey("/burst 8")
    stage.turns(2)
    stage.obey("/budget 24")
    stage.turns(1)
    first = stage.state.view.turns[-1][0]
    for i in range(4):
        stage.obey("x" * 300 + str(i))
    stage.finish()
    steps = [column.view for column in stage.state.history if column.step >= first]
    costs = [step.computed for step in steps if step.prefill]
    assert len(costs) > 10 and 24 - 8 <= max(costs) <= 24
    assert stage.state.view.engine.limits.budget == 24
    stage.obey("/budget off")
    stage.turns()
    assert stage.state.view.engine.limits == stage.state.view.made_with


def test_an_impossible_budget_is_refused_with_the_limits(stage):
    least, most = stage.state.view.made_with.budgets
    assert (least, most) == (8 + NARROWEST, 8 + WIDEST * 16)
    for wrong in (least - 1, most + 1):
        with pytest.raises(ValueError, match=rf"budget = {wrong}, .* {least} to {most}: a row"):
            stage.obey(f"/budget {wrong}")
    for right in (least, most):
        stage.obey(f"/budget {right}")
    with pytest.raises(ValueError, match="budget = 'many'"):
        stage.obey("/budget many")


@on_screen((200, 50))
async def test_keys_halve_and_double_the_chunk(it):
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


def test_a_run_with_a_changed_budget_is_not_replayed(stage):
    stage.obey("/burst 20")
    stage.turns(30)
    stage.obey("/budget 130")
    stage.finish()
    step = stage.state.view.turns[-1][0]
    words = f"the budget was turned to 130 in step {step:,}: a replay has only one"
    with pytest.raises(ValueError, match=words):
        stage.obey("/compare")
    stage.obey("/why p95")
    assert stage.state.kept["why"].why_not == words


def test_a_replay_uses_the_budget_of_its_run(stage):
    """Regression: the replay used the current budget, so its steps differed from those of the run."""
    stage.obey("/budget 40")
    stage.turns()
    stage.obey("/burst 20")
    stage.finish()
    ran = len(stage.state.history)
    assert len(race.compare(stage.state).runs[0].columns) == ran
    stage.obey("/budget 130")
    stage.turns()
    assert len(race.compare(stage.state).runs[0].columns) == ran


def test_the_totals_price_each_period_with_its_own_budget():
    """Regression: the makespan of an earlier period changed when the budget was changed after it."""
    stage = like_a_cpu(Stage().load())

    def makespans(count: int) -> list[str]:
        title, *rows = stage.lines(busy_periods.draw, 120, 40)[1 : count + 2]
        end = title.index("makespan") + len("makespan")
        return [row[end - 10 : end].strip() for row in reversed(rows)]

    seen = []
    for order in ("/budget off", "/budget 24", "/budget off"):
        stage.obey(order)
        stage.time.now += 1
        stage.obey("/burst 12")
        stage.turns(10)
        if len(seen) == 2:
            stage.obey("/budget 40")
        stage.finish()
        seen.append(makespans(len(seen) + 1))
    assert seen[2] == [*seen[1], "–"] and seen[1][0] == seen[0][0] != "–" != seen[1][1]


def test_a_race_and_clients_keep_their_budget(stage):
    stage.obey("/race 8")
    stage.turns(5)
    stage.obey("/budget 100")
    stage.turns()
    assert "its legs have one budget" in stage.state.faults[-1].message
    assert not stage.state.view.turns
    view = stage.state.view
    for others in (view._replace(watches=True), view._replace(server=object())):
        stage.state.view = others
        with pytest.raises(ValueError, match=r"no other budget .* clients would suffer"):
            stage.obey("/budget 100")
        with pytest.raises(ValueError, match=r"no long prompt .* clients would suffer"):
            stage.obey("/long")


def like_a_cpu(stage: Stage) -> Stage:
    """Make each step block until the device is done: 10 ms if anything decodes, and 0.1 ms for each prompt
    token."""
    runner = stage.engine.runner
    begin = runner.start_forward

    def begin_and_wait(order):
        flight = begin(order)
        tokens = sum(len(prefill.ids) for prefill in order.prefills)
        flight.cost = 0.01 * bool(order.decodes) + 0.0001 * tokens
        flight.read_back()
        flight.build_s = 0.0
        flight.device_s += flight.cost
        return flight

    runner.start_forward = begin_and_wait
    stage.engine.sched.chunk = 64
    stage.engine.sched.budget = 104
    return stage.turns()


def finish(stage: Stage) -> Stage:
    """Run until the experiment is over."""
    for _ in range(3000):
        stage.turns()
        if stage.session.settled:
            return stage
    raise AssertionError("this experiment never ends")


def until_read(stage: Stage) -> None:
    while not (stage.state.view.record and stage.state.view.record.newest):
        stage.turns()
    stage.turns(2)


def results(stage: Stage) -> tuple[long_prompt.LongPromptResult, ...]:
    return stage.state.records[long_prompt.NAME].results


def computed(stage: Stage, result: long_prompt.LongPromptResult) -> int:
    """Return the number of prompt tokens that were computed."""
    metrics = stage.state.requests[result.request].metrics
    return metrics.prompt_tokens - metrics.cached_tokens


def widest_read(stage: Stage, result: long_prompt.LongPromptResult) -> int:
    """Return the largest number of prompt tokens in a step that prefills the long prompt."""
    steps = [column.view for column in stage.state.history]
    reads = [step for step in steps if long_prompt.read_of(step, result.request)]
    return max(step.prompt_tokens for step in reads)


def chats(stage: Stage, result: long_prompt.LongPromptResult) -> int:
    """Return the number of requests that decoded during the long prompt's first chunk."""
    steps = [column.view for column in stage.state.history]
    return len(next(step for step in steps if long_prompt.read_of(step, result.request)).decode)


def test_a_long_prompt_reports_gaps_and_first_token():
    """With 16 tokens a step, each chat waits 1.6 ms longer, and the first token takes 33 steps."""
    stage = like_a_cpu(Stage().load())
    stage.obey("/long 24 104 520")
    finish(stage)
    found = results(stage)
    assert [result.budget for result in found] == ["24", "104", "520"]
    assert [result.widest for result in found] == [16, 64, computed(stage, found[2])]
    for result in found:
        # The whole prompt, since no rows of an earlier one are reused
        tokens = computed(stage, result)
        short = result.short.tokens if result.short else 0
        assert 480 < tokens <= 510 and chats(stage, result) == 6 and result.steps_between == 1
        assert -(-tokens // result.widest) <= result.steps <= -(-(tokens + short) // result.widest)
        assert result.quiet_gap == result.quiet_longest == pytest.approx(0.01)
        assert result.gap == pytest.approx(0.01 + result.widest * 0.0001, rel=0.1)
        assert result.longest == pytest.approx(0.01 + widest_read(stage, result) * 0.0001)
        in_flight = 0.01  # the step in flight when the prompt arrived
        assert result.ttft == pytest.approx(
            in_flight + result.steps * 0.01 + (tokens + short) * 0.0001
        )


def test_the_steps_of_a_short_prompt_are_counted():
    """Regression: no short prompt arrived during the long one, so the page did not show that it need not
    wait."""
    stage = like_a_cpu(Stage().load())
    stage.obey("/long 24")
    (result,) = results(finish(stage))
    short = result.short
    steps = [column.view for column in stage.state.history]
    reads = [step.step for step in steps if long_prompt.read_of(step, short.request)]
    last = max(step.step for step in steps if long_prompt.read_of(step, result.request))
    assert len(reads) == short.steps and last - reads[0] + 1 == short.long_steps
    assert short.steps == 3
    ends = f"r{result.request}'s after {short.long_steps}."
    said = f"its first token came after {short.steps} steps, {ends}"
    assert said in " ".join(page(stage).split())
    (lane,) = [line for line in page(stage).splitlines() if line.endswith(" short")]
    assert f"r{short.request} " in lane and lane.count("▒") == short.steps


@pytest.mark.parametrize(("slots", "budget"), [(2, ""), (8, "520")])
def test_a_long_prompt_without_a_short_one_says_so(slots, budget):
    """Two slots have no room for a short prompt, and it cannot arrive during a long prompt of a single step."""
    stage = like_a_cpu(Stage(slots=slots).load())
    stage.obey(f"/long {budget}")
    (result,) = results(finish(stage))
    assert result.short is None
    assert f"No short prompt was counted next to r{result.request}: " in " ".join(
        page(stage).split()
    )


def test_running_chats_are_used_and_go_on():
    stage = like_a_cpu(Stage().load())
    for i in range(3):
        stage.obey(f"a chat of mine {i}")
    stage.turns(8)
    stage.obey("/long")
    stage.turns(60)
    assert not stage.state.view.experimenting and chats(stage, results(stage)[0]) == 3
    assert len(stage.engine.sched.running) == 3 and stage.engine.sched.submitted == 5
    finish(stage)
    assert [request.reason for request in stage.state.ended[-3:]] == ["length"] * 3


def test_where_no_slot_is_free_it_says_so_and_waits():
    stage = like_a_cpu(Stage(slots=3).load())
    for i in range(3):
        stage.obey(f"/set max={50 + 80 * i}")
        stage.obey(f"a chat {i}")
    stage.turns(8)
    stage.obey("/long")
    stage.turns(5)
    assert "3 chats decode; a long prompt waits until a slot is free" in page(stage)
    finish(stage)
    assert chats(stage, results(stage)[0]) == 2


def page(stage: Stage, width: int = 120, height: int = 40) -> str:
    lines = drawn(long_prompt.draw, stage.state, width, height)
    assert len(lines) <= height
    assert all(cell_len(line) <= width for line in plain(lines))
    return "\n".join(plain(lines))


@pytest.mark.parametrize("end", ["cancel", "page", "itself"])
def test_the_budget_is_restored_and_the_chats_end(end):
    stage = like_a_cpu(Stage().load())
    own = stage.engine.sched.budget
    stage.obey("/budget 60")
    stage.session.stays = end != "itself"
    stage.obey("/long")
    until_read(stage)
    stage.obey("/budget 200")
    stage.turns(3)
    assert stage.engine.sched.budget == 200 and stage.state.view.experimenting
    if end == "cancel":
        stage.obey("/cancel all")
    if end == "page":
        long_prompt.PAGE.leave(stage.session)
    finish(stage)
    assert stage.engine.sched.budget == 60 and not stage.engine.sched.running
    stage.obey("/budget off")
    stage.turns()
    assert stage.engine.sched.budget == own


def test_a_budget_changed_in_mid_prompt_is_reported():
    stage = like_a_cpu(Stage().load())
    stage.obey("/long 24")
    until_read(stage)
    stage.turns(5)
    stage.obey("/budget 264")
    finish(stage)
    (result,) = results(stage)
    assert result.budget == "24→264" and result.widest == 256 and result.steps < 10


def test_a_policy_that_admits_nothing_is_refused():
    stage = like_a_cpu(Stage(policy="static").load())
    stage.obey("/long")
    finish(stage)
    assert "static blocks free slots" in stage.state.faults[-1].message
    assert not stage.engine.sched.running and "no long prompt has been read yet" in page(stage)


@on_screen((120, 40))
async def test_the_page_during_and_after_a_long_prompt(it):
    like_a_cpu(it.stage)
    it.stage.session.stays = True
    await it.press("L")
    await it.turns(70)
    await it.press("left_square_bracket", "left_square_bracket", "L")
    await it.turns(40)
    assert "tokens are read; budget 24, a chunk of 16 (made with 104)" in it.text()
    like_golden("long-120x40", it.text())
    await it.turns(60)
    await it.press("right_square_bracket", "L")
    await it.turns(70)
    assert len(results(it.stage)) == 3
    like_golden("longs-120x40", it.text())
    await it.press("escape", turns=3)
    assert it.stage.engine.sched.budget == 104 and not it.state.view.experimenting
    assert "Slots" in it.text()


def test_reopening_the_page_submits_another():
    """Regression: the new prompt went to the experiment that was about to end."""
    stage = like_a_cpu(Stage().load())
    stage.session.stays = True
    stage.obey("/long")
    stage.turns(80)
    long_prompt.PAGE.leave(stage.session)
    stage.obey("/long")
    stage.turns(80)
    assert len(results(stage)) == 2 and stage.state.view.experimenting


def test_the_calmest_of_equal_drops_counts():
    """Of several runs with one budget, the one with the shortest gap counts. Regression: an interruption of a
    second was attributed to the budget."""
    stage = like_a_cpu(Stage().load())
    begin = stage.engine.runner.start_forward

    def interrupted(order):
        stage.time.now += 1.0 if stage.engine.sched.steps % 3 == 0 else 0.0
        return begin(order)

    stage.engine.runner.start_forward = interrupted
    stage.obey("/long 520")
    stage.turns(12)
    finish(stage)
    assert "Noisy: a gap was 1.01 s without the long prompt, too" in " ".join(page(stage).split())
    stage.engine.runner.start_forward = begin
    stage.obey("/long 520 520 520")
    finish(stage)
    found = results(stage)
    calmest = min(result.gap for result in found)
    assert len(found) == 4 and calmest < found[-1].gap
    said = " ".join(page(stage).split())
    assert f"the calmest of 4): a chat's gap was {span(calmest)}, the longest" in said
    assert "Noisy" not in said and "; with" not in said


def test_leaving_the_page_ends_no_other_experiment(stage):
    stage.obey("/break client")
    stage.turns(2)
    long_prompt.PAGE.leave(stage.session)
    stage.turns(2)
    assert stage.state.view.experimenting
    stage.obey("/long")
    stage.turns(2)
    assert "another experiment is running" in stage.state.faults[-1].message
    stage.obey("/cancel all")
    stage.finish()
