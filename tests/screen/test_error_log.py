"""Failures are shown: tracebacks on their own page, and the error of a pane in its place."""

from dataclasses import replace

from screen_stage import on_screen, show

from base.error_reports import show_fault
from nanobatch import SamplingParams
from screen import app, engine_view
from screen.pages import error_log


@on_screen((120, 40))
async def test_a_failed_step_is_reported_with_its_place(it):
    it.stage.obey("one")
    await it.turns(5)
    it.stage.engine.runner.fail = RuntimeError("the device is on fire")
    await it.turns(2)
    await it.sees("failed; E shows")
    await it.press("E")
    await it.sees("Traceback (most recent call last):")
    text = it.text()
    assert (
        "Errors" in text
        and 'word_engine.py", line' in text
        and "RuntimeError: the device is on fire" in text
    )
    await it.press("escape")
    assert it.app.page is None


@on_screen((120, 40))
async def test_ten_thousand_faults_are_a_few_warnings(it):
    """Regression: each fault was a separate toast, and with a few thousand of them Textual froze."""
    it.stage.client.fault("the first")
    await it.turns()
    await it.sees("the first")
    it.state.faults += [engine_view.Fault(f"r{i} failed") for i in range(10_000)]
    await it.turns()
    await it.sees("other faults)")
    assert 1 <= len(it.app.screen.query("Toast")) <= app.WARNINGS
    await it.press("question_mark")
    assert it.app.page.name == "help"


def test_the_newest_tracebacks_are_kept():
    """Regression: all tracebacks were kept as long as the screen was open."""

    told = []

    async def scenario(it):
        it.app.warn = told.extend
        for number in range(app.TRACEBACKS + 20):
            show_fault(f"fault {number} came", ValueError("x"))
            if number % 30 == 0:
                await it.turns()
        await it.turns()
        await it.press("E")
        await it.sees(f"fault {number} came")
        kept = it.state.tracebacks
        assert len(kept) == app.TRACEBACKS and f"fault {number} came" in kept[-1]
        assert [line.split()[1] for line in told] == [str(i) for i in range(number + 1)]

    show(scenario, size=(120, 40))


def test_a_pane_that_raises_shows_its_error(monkeypatch, caplog):
    def broken(state, on):
        on.pen().put("?", on.no_such_colour)

    monkeypatch.setitem(app.PANES, "slots", broken)

    async def scenario(it):
        it.stage.obey("one")
        await it.turns(40)
        assert "✗ slots: AttributeError" in it.text() and "step" in it.text()
        assert len(it.state.tracebacks) == 1, "once, however often it is painted"
        await it.press("E", turns=3)
        await it.sees("the pane 'slots' cannot be drawn")
        assert (
            "in broken" in it.state.tracebacks[0] and "test_error_log.py" in it.state.tracebacks[0]
        )

    stage = show(scenario)
    assert stage.engine.registry.steps.count > 10
    assert len(caplog.records) == 1


def test_tracebacks_go_to_the_terminal_after_the_screen(caplog):
    async def scenario(it):
        await it.turns()

    stage = show(scenario)
    show_fault("a test failed", ValueError("after the end"))
    assert stage.state.tracebacks == [] and "a test failed" in caplog.text


def test_a_notice_that_outlives_the_screen_is_no_fault():
    """Regression: a notice's timer that fired while the program exited printed a traceback."""
    apps = []

    async def scenario(it):
        await it.press("b")
        apps.append(it.app)

    stage = show(scenario)
    assert not apps[0].screen_stack
    apps[0].hush(stage.state.said)


def test_failed_requests_are_on_the_page_of_errors(stage):
    """Regression: after a NaN the page said that nothing had failed."""
    stage.obey("one")
    handle = stage.engine.submit([97], SamplingParams(max_tokens=9))
    stage.turns(2)
    ended = replace(handle.view(), reason="error", error="the model computed no number", ended=1.0)
    stage.state.ended.append(ended)
    text = "".join(stage.lines(error_log.draw, 80, 24))
    assert f"r{handle.id} failed: the model computed no number" in text
    assert "Nothing has failed" not in text
