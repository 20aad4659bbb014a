"""Busy periods and their totals, the step pane, and how many requests the screen remembers."""

import re
from dataclasses import replace

import pytest
from screen_stage import Stage, like_golden, on_screen

from engine.snapshot import RequestView, percentile
from nanobatch import SamplingParams
from screen import timeline_columns
from screen.draw import status, step
from screen.pages import busy_periods, request_details


def test_the_statistics_of_a_busy_period(stage):
    """Regression: no statistics were left to read after a burst."""
    for policy in ("continuous", "static"):
        stage.obey(f"/policy {policy}")
        stage.obey("/burst 20")
        if policy == "static":
            stage.turns(30)
            stage.obey("/pause")
            stage.turns()
            stage.time.now += 100  # the user looks at the screen for a while
            stage.obey("/resume")
        stage.finish()
    first, second = stage.state.periods
    assert first.over and second.over and list(second.policies) == ["static"]
    for period, ended in ((first, stage.state.ended[:20]), (second, stage.state.ended[20:])):
        assert (period.requests, period.lost) == (20, 0)
        assert period.tokens == sum(r.metrics.output_tokens for r in ended)
        assert period.began == min(r.arrived for r in ended)
        assert period.ended - period.began == pytest.approx(
            max(r.ended for r in ended) - period.began, abs=0.03
        )
        assert sorted(period.ttfts) == sorted(r.metrics.ttft_s for r in ended)
        gaps = sum(r.metrics.output_tokens - 1 for r in ended)
        assert len(period.gaps) == gaps and 0.01 <= percentile(period.gaps, 0.95) <= 0.03
    for period in (first, second):
        steps = [c for c in stage.state.history if c.view.policy in period.policies]
        assert period.figures["slots used"] == f"{timeline_columns.useful_of(steps):.0f} %"
    assert second.ended - second.began < 20, "the pause is not part of it"


def test_each_leg_of_a_race_is_a_period(stage):
    stage.obey("/race 10")
    stage.finish()
    assert [(list(p.policies), p.requests) for p in stage.state.periods] == [
        (["static"], 10),
        (["continuous"], 10),
    ]
    stage.obey("/pause")
    stage.obey("/burst 5")
    stage.obey("/cancel all")  # none of these has started
    stage.turns(3)
    assert len(stage.state.periods) == 2


@on_screen((120, 40))
async def test_totals_after_a_burst(it):
    it.stage.obey("/resume")  # otherwise the prompt box might take the key as text
    await it.press("t")
    assert "Nothing has run yet" in it.text()
    await it.press("escape", "b", turns=2)
    assert "last:" not in it.text()
    it.stage.finish()
    it.stage.obey("/policy static")
    it.stage.obey("/burst 30")
    it.stage.finish()
    await it.turns()
    period = it.state.periods[-1]
    assert f" last: 30 requests, {period.tokens:,} tokens, " in it.text() and " tok/s" in it.text()
    await it.press("t")
    like_golden("totals-120x40", it.text())
    await it.press("escape", turns=0)
    assert "Slots" in it.text()


def test_requests_whose_ends_were_missed_are_forgotten():
    """Regression: requests whose end was missed stayed in the list of open ones, so memory grew, and each
    chart iterated over them."""
    stage = Stage(slots=2).load()
    handles = [
        stage.engine.submit([1], SamplingParams(max_tokens=400, ignore_eos=True))
        for _ in range(1500)
    ]
    stage.turns(3)
    assert len(stage.state.requests) == 1500
    for handle in handles[:1400]:
        handle.cancel()
    stage.turns()
    assert (
        len(stage.state.requests) <= 600 and set(range(1401, 1501)) <= stage.state.requests.keys()
    )


def test_counts_go_on_beyond_what_is_remembered():
    """Regression: after 500 requests, the count stayed at "500 ended"."""
    stage = Stage(slots=2).load()
    stage.state.REMEMBERED = 50
    for _ in range(6):
        for _ in range(100):
            stage.engine.submit([1], SamplingParams(max_tokens=1, ignore_eos=True))
        stage.finish()
    assert "600 ended" in stage.lines(status.draw_status, 80, 1)[0]
    assert (
        sum(period.requests for period in stage.state.periods) == 600
        and len(stage.state.ended) == 50
    )
    assert "1 of 600 that have ended" in stage.lines(request_details.draw, 80, 20)[0]


def absorb(stage: Stage, ended: RequestView) -> None:
    engine = replace(stage.engine.snapshot(), ended=(ended,))
    stage.state.absorb(stage.state.view._replace(engine=engine))


def test_of_requests_with_long_texts_fewer_can_be_opened():
    """Regression: the texts of 2,000 requests were kept, which took 200 MB for prompts of 100,000 characters."""
    stage = Stage(slots=2).load()
    stage.state.TEXTS = 9 * 10_000
    for number in range(30):
        view = stage.engine.submit([1], SamplingParams(max_tokens=1, ignore_eos=True)).view()
        view = replace(view, prompt=str(number % 10) * 10_000, ended=0.0)
        absorb(stage, view)
    assert [view.prompt[0] for view in stage.state.ended] == list("23456789")
    assert {view.id for view in stage.state.ended} <= stage.state.requests.keys()
    absorb(stage, replace(view, prompt="x" * 10**6))
    assert [view.prompt[0] for view in stage.state.ended] == ["x"], "the newest can be opened"


def test_the_step_pane():
    stage = Stage(slots=4).load()
    # After a and b, 7 tokens of the budget are left: d gets them, and c is held
    for letter, length in (("a", 20), ("b", 9), ("c", 20), ("d", 7)):
        stage.obey(letter * length)
    stage.turns(2)
    text = "\n".join(stage.lines(step.draw_step, 70, 14))
    admitted = "r1 → slot 0, r2 → slot 1, r3 → slot 2: empty; r4 → slot 3: the only free slot"
    assert admitted in " ".join(text.split())
    assert "r1 0–16 → slot 0, r2 0–9 → slot 1, r4 0–7 → slot 3" in text
    assert "32 prefill + 0 decode = 32 in one step" in text
    assert re.search(r"budget +cost 32 \+ 0 of 32$", text, re.MULTILINE)
    assert "held     r3: over the budget, or what they share is being written" in text
    stage.turns()  # the device is one step behind Python
    lines = stage.lines(step.draw_step, 70, 14)
    assert lines[-3:-1] == [
        " time     15.00 ms = Python 1.00 + device 14.00 + wait 0.00",
        " Python   plan 0.00, build 1.00, commit 0.00",
    ]
    assert re.fullmatch(r" {10}─*P─+device─+w", lines[-1]), lines[-1]
    stage.obey("/cancel all")
    stage.obey("d")
    stage.turns(4)
    text = " ".join(stage.lines(step.draw_step, 70, 14))
    assert re.search(r"decode +slot \d ", text), "one slot was called slots"


def test_the_farewell_fits_any_width(stage):
    """Regression: a width of one column raised a ValueError."""
    stage.obey("/burst 12")
    stage.finish()
    for width in range(160):
        lines = busy_periods.farewell(stage.state, width)
        assert lines and all(len(line) <= max(2, width) for line in lines), width
    assert len(busy_periods.farewell(stage.state, 160)) > 2
