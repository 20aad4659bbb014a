"""What the charts teach: each figure on the screen matches the engine, and nothing impossible is shown."""

import re
from functools import partial
from types import SimpleNamespace

import pytest
from screen_stage import Stage, show
from word_engine import Clock, WordRunner

from nanobatch import SamplingParams
from screen import timeline_columns, widgets
from screen.draw import charts, slots, style, timeline
from screen.draw import step as steps
from screen.draw.style import PREFILL


def test_the_timeline_shows_each_kind_of_work():
    stage = Stage(slots=3).load()
    # A chunk is 16 tokens, and a step's budget is 32
    for letter, length in (("a", 48), ("b", 64), ("c", 16)):
        stage.obey(letter * length)
    stage.turns(20)
    assert [stage.cells(slot)[:7] for slot in range(3)] == ["▒▒▒████", "┈▒▒▒▒▒█", "▒██████"]
    lines = stage.lines(timeline.draw_timeline, 73, 5)
    assert [line[:11] for line in lines[1:4]] == ["  0 ▒1▒████", "  1 ┈2▒▒▒▒█", "  2 ▒3█████"]
    assert lines[0].endswith("used 98 % ▒prefill █decode ╳blocked ┈held ▚ghost ·free ──"), lines


def test_merged_columns_lose_no_prefill_and_no_work():
    stage = Stage().load()
    stage.obey("/burst 20")
    stage.finish()
    for zoom in (2, 4, 8):
        merged = stage.state.columns(zoom)
        assert sum(column.steps for column in merged) == len(stage.state.history)
        assert timeline_columns.useful_of(merged) == pytest.approx(
            timeline_columns.useful_of(stage.state.history)
        )
        assert sum(c.tokens for c in merged) == sum(c.tokens for c in stage.state.history)
        for i, column in enumerate(merged):
            for slot in range(8):
                kinds = {c.cells[slot].kind for c in stage.state.history[i * zoom : (i + 1) * zoom]}
                assert (column.cells[slot].kind == PREFILL) == (PREFILL in kinds)


def test_why_requests_wait_is_told():
    stage = Stage(policy="static").load()
    stage.obey("/burst 20")
    stage.turns(2)
    assert "every slot is taken" in stage.lines(slots.draw_slots, 80, 11)[-1]
    stage.obey("/pause")
    stage.turns()
    assert "paused" in stage.lines(slots.draw_slots, 80, 11)[-1]
    stage.obey("/resume")
    stage.turns(60)
    lines = stage.lines(slots.draw_slots, 80, 11)
    assert "free slots are blocked (static)" in lines[-1]
    assert any("blocked" in line for line in lines[:-1])


def test_why_batching_pays_by_rows():
    """Regression: nothing showed why batching pays: a step of 8 rows takes hardly longer than a step of 1."""
    stage = Stage(slots=4).load()
    lines = stage.lines(charts.draw_cost, 60, 12)
    assert "No step has only decoded so far" in " ".join(lines)
    cost = WordRunner.start_forward

    def dearer(runner, order):
        flight = cost(runner, order)
        flight.cost += 0.002 * len(order.decodes)  # a step of n rows takes 10 + 2 n ms
        return flight

    stage.engine.runner.start_forward = partial(dearer, stage.engine.runner)
    stage.obey("alone")
    stage.finish()
    assert "All steps had 1 row so far" in " ".join(stage.lines(charts.draw_cost, 120, 12))
    stage.obey("/burst 12")
    stage.finish()
    for seconds in stage.state.costs.values():
        seconds.extend([9.0] * (len(seconds) // 2))  # simulated interruptions
    lines = stage.lines(charts.draw_cost, 70, 12)
    rows = [re.findall(r"[\d.]+", line) for line in lines[2:6]]
    assert [[float(value) for value in row] for row in rows] == [
        pytest.approx([n, 10 + 2 * n, n / (0.010 + 0.002 * n)], rel=0.01) for n in (1, 2, 3, 4)
    ]
    assert lines[6].strip() == "4 rows cost 1.50 × as much as 1 row, and yield 2.67 × the tokens."
    assert len(stage.lines(charts.draw_cost, 70, 5)) <= 5


def test_what_cannot_be_true_is_not_said():
    """The chart used to say "8 rows cost 0.90 × as much as 1 row, and yield 8.92 × the tokens" and "0.00 ms
    more for each row", and to suggest a burst while one was running."""
    assert (
        charts.lesson({1: 0.010, 8: 0.009}, False)
        == "Too noisy to say: 8 rows took less time than 1 row."
    )
    assert "Too noisy" not in charts.lesson({1: 0.010, 8: 0.010}, False)
    assert "fire a burst (b)" in charts.lesson({8: 0.01}, False) and "fire" not in charts.lesson(
        {8: 0.01}, True
    )
    stage = Stage(slots=2, prompts=[("hello", 30), ("you", 20)]).load()
    stage.obey("/burst 4")
    stage.finish()

    stage.obey("/compare")  # here, all steps take equally long
    said = "10.0 ms with one row, too noisy to say how much more for each row, "
    assert (
        said in stage.state.kept["compare"].note
        and "0.00 ms" not in stage.state.kept["compare"].note
    )


def test_the_rate_is_what_the_steps_delivered():
    stage = Stage().load()
    stage.obey("/burst 8")
    stage.finish()
    history = stage.state.history

    def delivered(began: float, ended: float) -> float:
        return timeline_columns.spread(history, began, ended, lambda column: column.tokens)

    began = history[0].began
    assert delivered(began, history[-1].ended) == pytest.approx(sum(c.tokens for c in history))
    assert delivered(began - 9, began) == 0
    totals = [sum(c.tokens for c in history[:stop]) for stop in (20, 21)]
    middle = (history[20].began + history[20].ended) / 2
    assert delivered(began, middle) == pytest.approx(sum(totals) / 2)


def test_missed_steps_are_drawn_as_a_gap():
    """Regression: the timeline continued as if no step were missing, and tokens/s ignored the tokens of the
    missed steps."""
    stage = Stage(slots=2).load()
    stage.engine.submit([1], SamplingParams(max_tokens=9, ignore_eos=True)).result()
    stage.turns()
    for _ in range(45):
        stage.engine.submit([1], SamplingParams(max_tokens=100, ignore_eos=True)).result()
    stage.turns()
    history, missed = (
        stage.state.history,
        stage.engine.registry.steps.count - 4096 - stage.state.history[0].step - 8,
    )
    (at,) = [i for i, column in enumerate(history) if column.unseen]
    gap = history[at]
    assert gap.unseen == missed > 300 and {cell.kind for cell in gap.cells} == {style.UNSEEN}
    assert gap.step == history[at + 1].step - 1 and history[at - 1].step == gap.step - missed
    delivered = sum(column.tokens for column in history)
    assert delivered == stage.state.view.engine.output_tokens == 9 + 4500
    stage.state.cursor = stage.state.edge = gap.step
    stage.state.zoom = 1
    lines = stage.lines(timeline.draw_timeline, 80, 4)
    assert "?" in lines[1] and "?" in lines[2] and "unseen" in lines[0]
    assert f"{missed:,} steps up to this one went by" in stage.lines(steps.draw_step, 80, 9)[1]
    for zoom in (2, 4, 8):
        merged = stage.state.columns(zoom)
        assert sum(column.unseen for column in merged) == missed
        assert sum(cell.kind == style.UNSEEN for column in merged for cell in column.cells) == 2
    assert 0 < timeline_columns.useful_of(history) <= 100


def test_no_step_is_missed_at_full_speed():
    """Three loops run at once: the engine at full speed, the updates of the view, and the drawing."""
    stage = Stage()

    async def scenario(it):
        loop = stage.client.loop.start()
        stage.obey("/set max=300")
        stage.obey("/burst 90")
        it.app.set_interval(0.1, it.app.poll)
        await it.app.until(lambda: stage.state.ended and stage.session.settled)
        assert loop.stop(10)

    show(scenario, stage, (120, 40))
    steps = [column.step for column in stage.state.history]
    assert steps == list(range(1, stage.engine.registry.steps.count + 1)) and len(steps) > 1000
    assert len(stage.state.ended) == 90 and not stage.state.faults


def test_the_screens_share_of_a_core_is_bounded(monkeypatch):
    """If drawing is slow, the screen is updated less often, because the engine needs the core: 20 ms ten times
    a second would be a fifth of it."""
    now, used, looks = Clock(), Clock(), []
    monkeypatch.setattr(widgets, "time", SimpleNamespace(monotonic=now, thread_time=used))

    def run(price: float, seconds: float) -> list[float]:
        looks.clear()
        look = widgets.thrifty(lambda: looks.append(now.now))
        for _ in range(round(10 * seconds)):
            look_count = len(looks)
            look()
            used.now += price * (len(looks) - look_count)
            now.now += 0.1
        return looks

    assert len(run(0.005, 10)) == 100 and len(run(0.015, 10)) == 50
    assert len(run(0.030, 10)) in (33, 34) and len(run(0.5, 10)) == 20
